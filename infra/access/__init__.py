"""The stack that limits what every role of the stage may do, and lets CI deploy. It is the first."""
