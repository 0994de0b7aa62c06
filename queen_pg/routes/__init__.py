"""The routes: Queen MQ's wire, in and out. Nothing is decided here."""
