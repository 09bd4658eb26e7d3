"""What judges a run. Each oracle returns violations in words; none of them imports what it judges."""
