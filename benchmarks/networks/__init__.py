"""Published networks, built with the front end and costed on tiles: shapes only, no weights are ever made."""
