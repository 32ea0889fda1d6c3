CREATE TABLE IF NOT EXISTS accepted (digest BLOB PRIMARY KEY, verdict BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS kept (digest BLOB PRIMARY KEY, verdict BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS numbers (lineage INTEGER, policy INTEGER, step INTEGER, number INTEGER,
  worker TEXT, digest BLOB NOT NULL, PRIMARY KEY (lineage, policy, step, number, worker)) WITHOUT
  ROWID;
CREATE TABLE IF NOT EXISTS orders (lineage INTEGER, step INTEGER, revision INTEGER, message BLOB NOT
  NULL, PRIMARY KEY (lineage, step));
CREATE TABLE IF NOT EXISTS batches (lineage INTEGER, step INTEGER, reward REAL NOT NULL, consumed
  BLOB NOT NULL, PRIMARY KEY (lineage, step));
CREATE TABLE IF NOT EXISTS state_values (lineage INTEGER, step INTEGER, given BLOB NOT NULL, PRIMARY
  KEY (lineage, step));
