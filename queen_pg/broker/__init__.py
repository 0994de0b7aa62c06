"""The doors: one typed function for each call that the broker makes into the database."""
