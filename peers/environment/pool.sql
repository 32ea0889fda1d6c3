CREATE TABLE IF NOT EXISTS turns (seed BLOB NOT NULL, grp INTEGER NOT NULL, sample INTEGER NOT NULL,
  idx INTEGER NOT NULL, before BLOB NOT NULL, lineage INTEGER NOT NULL, step INTEGER NOT NULL,
  envelope BLOB NOT NULL, worker TEXT NOT NULL, network TEXT NOT NULL,
  PRIMARY KEY (seed, grp, sample, idx, before)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS by_step ON turns (lineage, step);
