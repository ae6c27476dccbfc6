"""Which rows make a step, and which of them are whose: orders, costs, and even shares of ranks."""
