"""What certifying models with experts takes: a smaller mixture, and what routers counted."""
