"""Storage under s3://: a mirror on this machine that everything else works in, and what goes to and fro."""
