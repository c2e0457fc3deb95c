"""The job kinds, one module each: the model of the arguments, and the catalog's row `KIND`."""
