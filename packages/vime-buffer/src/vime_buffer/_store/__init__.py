"""The buffer's state in rows. Every function takes a Transaction; none keeps anything in memory."""
