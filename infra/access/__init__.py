"""Limit what every role of the stage may do, and let CI deploy. The first stack."""
