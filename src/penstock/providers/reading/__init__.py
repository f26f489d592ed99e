"""Read answers of providers within bounds: estimate their tokens, and limit their size."""
