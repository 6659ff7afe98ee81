"""Model Runner V2: drafts that no step waits for."""
