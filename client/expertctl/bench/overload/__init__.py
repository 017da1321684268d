"""More requests than a server can do, each with a deadline: what is answered in time, and what is refused how soon."""
