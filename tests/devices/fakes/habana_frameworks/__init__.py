"""Stand-in for Intel's package."""
