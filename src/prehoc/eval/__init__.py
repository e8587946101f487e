"""What methods cost in quality, measured on real texts."""
