"""What is measured, and how; results/ holds figures with commit, hardware, precision and command."""
