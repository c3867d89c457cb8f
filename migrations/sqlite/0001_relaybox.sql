-- The tables of relaybox for SQLite 3.42 or later. What each column does: migrations/README.md.
-- Instants are whole microseconds since 1970-01-01 00:00 UTC.

CREATE TABLE relaybox_outbox (
    -- AUTOINCREMENT: a position is never used twice, also after the newest row is gone.
    position     INTEGER PRIMARY KEY AUTOINCREMENT,
    lane         INTEGER NOT NULL CHECK (lane BETWEEN 0 AND 15),
    message_id   TEXT    NOT NULL,
    destination  TEXT    NOT NULL,
    key          BLOB,
    event_type   TEXT    NOT NULL,
    content_type TEXT,
    headers      TEXT,
    payload      BLOB,
    size         INTEGER NOT NULL CHECK (size BETWEEN 0 AND 2147483647),
    version      INTEGER,
    occurred_at  INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    enqueued_at  INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    UNIQUE (lane, position)
) STRICT;

CREATE TABLE relaybox_outbox_aside (
    position        INTEGER PRIMARY KEY AUTOINCREMENT,
    state           TEXT    NOT NULL,
    reason          TEXT    NOT NULL,
    error           TEXT,
    scope           TEXT,
    outbox_position INTEGER,
    due_at          INTEGER,
    attempts        INTEGER NOT NULL DEFAULT 0,
    set_aside_at    INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    lane            INTEGER NOT NULL CHECK (lane BETWEEN 0 AND 15),
    message_id      TEXT    NOT NULL,
    destination     TEXT    NOT NULL,
    key             BLOB,
    event_type      TEXT    NOT NULL,
    content_type    TEXT,
    headers         TEXT,
    payload         BLOB,
    size            INTEGER NOT NULL,
    version         INTEGER,
    occurred_at     INTEGER NOT NULL,
    -- Only for their indexes: CREATE INDEX cannot follow a schema prefix. The row of a verdict and what may go; what is
    -- ahead in a scope and key; what there is at all, and what is due.
    UNIQUE (lane, outbox_position, position),
    UNIQUE (lane, key, scope, outbox_position, position),
    UNIQUE (state, due_at, position)
) STRICT;

-- What was published, where relays are told to keep it.
CREATE TABLE relaybox_outbox_history (
    number       INTEGER PRIMARY KEY,
    published_at INTEGER NOT NULL,
    position     INTEGER NOT NULL,
    lane         INTEGER NOT NULL,
    message_id   TEXT    NOT NULL,
    destination  TEXT    NOT NULL,
    key          BLOB,
    event_type   TEXT    NOT NULL,
    content_type TEXT,
    headers      TEXT,
    payload      BLOB,
    size         INTEGER NOT NULL,
    version      INTEGER,
    occurred_at  INTEGER NOT NULL,
    -- Only for their indexes: CREATE INDEX cannot follow a schema prefix. The message, and what is over.
    UNIQUE (message_id, number),
    UNIQUE (published_at, number)
) STRICT;

-- What an operator said about destinations.
CREATE TABLE relaybox_outbox_destination (
    destination TEXT    PRIMARY KEY NOT NULL,
    paused      INTEGER NOT NULL DEFAULT 0,
    rate_max    INTEGER CHECK (rate_max > 0),
    because     TEXT    NOT NULL,
    changed_at  INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER))
) STRICT;

CREATE TABLE relaybox_outbox_lane (
    lane       INTEGER PRIMARY KEY CHECK (lane BETWEEN 0 AND 15),
    token      INTEGER NOT NULL DEFAULT 0,
    owner      TEXT,
    expires_at INTEGER NOT NULL DEFAULT 0
) STRICT;

INSERT INTO relaybox_outbox_lane (lane)
VALUES (0), (1), (2), (3), (4), (5), (6), (7), (8), (9), (10), (11), (12), (13), (14), (15);

CREATE TABLE relaybox_relay (
    id         TEXT    PRIMARY KEY NOT NULL,
    name       TEXT    NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;

CREATE TABLE relaybox_inbox (
    consumer    TEXT    NOT NULL,
    message_id  TEXT    NOT NULL,
    recorded_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    PRIMARY KEY (consumer, message_id),
    -- Only for its index: CREATE INDEX cannot follow a schema prefix.
    UNIQUE (consumer, recorded_at, message_id)
) STRICT, WITHOUT ROWID;

-- Work that may end its process, from its start to its end, whichever.
CREATE TABLE relaybox_inbox_start (
    consumer    TEXT    NOT NULL,
    message_id  TEXT    NOT NULL,
    run         TEXT    NOT NULL,
    started_at  INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    PRIMARY KEY (consumer, message_id),
    -- Only for its index: CREATE INDEX cannot follow a schema prefix.
    UNIQUE (consumer, started_at, message_id)
) STRICT, WITHOUT ROWID;

CREATE TABLE relaybox_aggregate_version (
    consumer   TEXT    NOT NULL,
    aggregate  BLOB    NOT NULL,
    version    INTEGER NOT NULL,
    updated_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    PRIMARY KEY (consumer, aggregate),
    -- Only for its index: CREATE INDEX cannot follow a schema prefix.
    UNIQUE (consumer, updated_at, aggregate)
) STRICT, WITHOUT ROWID;

CREATE TABLE relaybox_dead_letter (
    position         INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer         TEXT    NOT NULL,
    message_id       TEXT    NOT NULL,
    redrive_count    INTEGER NOT NULL,
    digest           BLOB    NOT NULL,
    reason           TEXT,
    retry_count      INTEGER NOT NULL,
    first_failed_at  INTEGER,
    last_failed_at   INTEGER,
    last_error       TEXT,
    owner            TEXT,
    note             TEXT,
    origin_topic     TEXT,
    origin_partition TEXT,
    origin_offset    TEXT,
    destination      TEXT    NOT NULL,
    key              BLOB,
    event_type       TEXT    NOT NULL,
    content_type     TEXT,
    headers          TEXT,
    payload          BLOB,
    size             INTEGER NOT NULL,
    version          INTEGER,
    occurred_at      INTEGER NOT NULL,
    stored_at        INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    UNIQUE (consumer, message_id, redrive_count, digest),
    UNIQUE (consumer, position)
) STRICT;

CREATE TABLE relaybox_redrive_run (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer     TEXT    NOT NULL,
    operator     TEXT    NOT NULL,
    plan         TEXT    NOT NULL,
    end_position INTEGER NOT NULL,
    state        TEXT    NOT NULL DEFAULT 'planned',
    cursor       INTEGER NOT NULL DEFAULT 0,
    in_hand      TEXT    NOT NULL DEFAULT '[]',
    token        INTEGER NOT NULL DEFAULT 0,
    sent         INTEGER NOT NULL DEFAULT 0,
    refused      INTEGER NOT NULL DEFAULT 0,
    rejected     INTEGER NOT NULL DEFAULT 0,
    proved       INTEGER NOT NULL DEFAULT 0,
    error        TEXT,
    planned_at   INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    changed_at   INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    UNIQUE (consumer, id)
) STRICT;

CREATE TABLE relaybox_redrive_audit (
    position      INTEGER PRIMARY KEY AUTOINCREMENT,
    at            INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    run           INTEGER,
    consumer      TEXT    NOT NULL,
    operator      TEXT    NOT NULL,
    verb          TEXT    NOT NULL,
    message_id    TEXT    NOT NULL,
    redrive_count INTEGER NOT NULL,
    digest        BLOB    NOT NULL,
    outcome       TEXT    NOT NULL,
    detail        TEXT    NOT NULL,
    -- Only for their indexes: CREATE INDEX cannot follow a schema prefix. The list, the age, and what has left already.
    UNIQUE (consumer, position),
    UNIQUE (consumer, at, position),
    UNIQUE (consumer, message_id, redrive_count, digest, position)
) STRICT;

-- Messages that wait in the consumer's database for their next attempt, and those of their key behind them.
CREATE TABLE relaybox_waiting (
    position         INTEGER PRIMARY KEY AUTOINCREMENT,
    consumer         TEXT    NOT NULL,
    identity         BLOB    NOT NULL CHECK (length(identity) = 16),
    line             BLOB    CHECK (length(line) = 16),
    state            TEXT    NOT NULL,
    source           TEXT    NOT NULL,
    due_at           INTEGER,
    visible_at       INTEGER,
    token            INTEGER NOT NULL DEFAULT 0,
    claims           INTEGER NOT NULL DEFAULT 0,
    park_to          INTEGER,
    redrive_count    INTEGER NOT NULL,
    reason           TEXT,
    retry_count      INTEGER NOT NULL,
    first_failed_at  INTEGER,
    last_failed_at   INTEGER,
    last_error       TEXT,
    origin_topic     TEXT,
    origin_partition TEXT,
    origin_offset    TEXT,
    failed_by        TEXT,
    message_id       TEXT    NOT NULL,
    destination      TEXT    NOT NULL,
    key              BLOB,
    event_type       TEXT    NOT NULL,
    content_type     TEXT,
    headers          TEXT,
    payload          BLOB,
    version          INTEGER,
    occurred_at      INTEGER NOT NULL,
    size             INTEGER NOT NULL,
    stored_at        INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    UNIQUE (consumer, identity),
    -- Only for their indexes: CREATE INDEX cannot follow a schema prefix. What is due; the ends of a line; notes that are old.
    UNIQUE (consumer, visible_at, position),
    UNIQUE (consumer, line, position),
    UNIQUE (consumer, state, stored_at, position)
) STRICT;
