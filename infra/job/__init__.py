"""Define jobs, and the roles of their containers and of the people who submit them."""
