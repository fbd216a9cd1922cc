"""A trained model that reads and writes text: sampling and scoring with a cache."""
