"""What is measured, and how; results/ has the measurements with commit, hardware, precision and command."""
