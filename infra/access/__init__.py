"""The first stack: it limits what every role of the stage may do, and lets CI deploy."""
