CREATE TABLE IF NOT EXISTS made (run TEXT NOT NULL, lineage INTEGER NOT NULL,
  step INTEGER NOT NULL, number INTEGER NOT NULL, entry BLOB NOT NULL, submission BLOB NOT NULL,
  nonce BLOB NOT NULL, ordered BLOB, judged INTEGER NOT NULL DEFAULT 0, receipt BLOB, policies BLOB,
  PRIMARY KEY (run, lineage, step, number)) WITHOUT ROWID;
