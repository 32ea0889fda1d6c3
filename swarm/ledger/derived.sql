CREATE TABLE IF NOT EXISTS verdicts (position INTEGER PRIMARY KEY, worker TEXT NOT NULL, envelope
  BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS refused (worker TEXT, submission BLOB, PRIMARY KEY (worker, submission))
  WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS expulsions (envelope BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS reinstated (peer TEXT, owner TEXT, position INTEGER, envelope BLOB NOT
  NULL, PRIMARY KEY (peer, owner, position)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS used (submission BLOB PRIMARY KEY) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evidence (worker TEXT, owner TEXT, position INTEGER, evidence BLOB NOT
  NULL, PRIMARY KEY (worker, owner, position)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS seals (owner TEXT, position INTEGER, epoch INTEGER NOT NULL, stated BLOB
  NOT NULL, PRIMARY KEY (owner, position)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS sealed_capitals (worker TEXT, owner TEXT, position INTEGER NOT NULL,
  capitals BLOB NOT NULL, PRIMARY KEY (worker, owner)) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS verdicts_of ON verdicts (worker, position);
CREATE TABLE IF NOT EXISTS redeemed (invite BLOB, redeemed_ms INTEGER, peer TEXT, PRIMARY KEY
  (invite, redeemed_ms, peer)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS authority (raw BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS verdict_places (worker TEXT, step INTEGER, number INTEGER, owner TEXT,
  position INTEGER, PRIMARY KEY (worker, step, number, owner, position)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS balances (worker TEXT, step INTEGER, tokens INTEGER NOT NULL,
  PRIMARY KEY (worker, step)) WITHOUT ROWID;
