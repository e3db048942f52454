"""Order of ops on every stage for given chunks: problem, list scheduler, policies."""
