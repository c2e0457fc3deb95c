"""notebook: JupyterLab and TensorBoard on the instance."""
