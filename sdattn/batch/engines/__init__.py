"""Who draws a run: processes of a team, actors of Ray, and what each of them does."""
