"""Event times and jumps."""
