"""The job kinds, one module each: the model of its arguments, and its row of the catalog as `KIND`."""
