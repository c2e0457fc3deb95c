"""`trainyard data`: look into tables, and keep a team's files in the stage's data bucket."""
