CREATE TABLE IF NOT EXISTS entries (owner TEXT, position INTEGER, entry BLOB NOT NULL,
  PRIMARY KEY (owner, position)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS nodes (owner TEXT, level INTEGER, position INTEGER, hash BLOB NOT NULL,
  PRIMARY KEY (owner, level, position)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS starts (owner TEXT PRIMARY KEY, position INTEGER);
CREATE TABLE IF NOT EXISTS heads (owner TEXT PRIMARY KEY, envelope BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS forks (owner TEXT, first BLOB, second BLOB,
  PRIMARY KEY (owner, first, second)) WITHOUT ROWID;
