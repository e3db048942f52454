"""Programs: the orders of a plan with their messages, as every stage issues them."""
