CREATE TABLE IF NOT EXISTS proven_faults (position INTEGER PRIMARY KEY, submission BLOB NOT NULL,
  worker TEXT NOT NULL, record BLOB NOT NULL, UNIQUE (submission, worker));
