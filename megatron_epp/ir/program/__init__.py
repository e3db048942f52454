"""Programs: the orders of a plan with their messages, as each rank executes them."""
