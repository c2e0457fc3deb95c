"""What an image must show in a container of it. A check is a row of table.py; what it runs there lies in inside/."""
