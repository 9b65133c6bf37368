"""The `homing` command. Each subcommand imports what it needs when it runs, so help is instant."""
