"""Pictures of published results; matplotlib is imported only when one is drawn."""
