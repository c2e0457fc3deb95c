"""The stack of job definitions, with the roles of containers and of the people who submit jobs."""
