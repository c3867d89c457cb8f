-- The tables of relaybox for PostgreSQL 13 or later. What each column does: migrations/README.md.

CREATE TABLE relaybox_outbox (
    -- First, because defaults are evaluated in column order: a transaction has its id before it draws a position,
    -- and a reader's scan floor rests on that.
    xid          xid8        NOT NULL DEFAULT pg_current_xact_id(),
    position     bigint      GENERATED ALWAYS AS IDENTITY (CACHE 1 NO CYCLE),
    lane         int         NOT NULL CHECK (lane BETWEEN 0 AND 15),
    message_id   text        NOT NULL,
    -- An index over the rows set aside holds it.
    destination  text        NOT NULL CHECK (octet_length(destination) <= 1024),
    key          bytea,
    event_type   text        NOT NULL,
    content_type text,
    headers      text,
    payload      bytea,
    size         int         NOT NULL CHECK (size >= 0),
    version      bigint,
    occurred_at  timestamptz NOT NULL DEFAULT clock_timestamp()
        CHECK (occurred_at >= '0001-01-01 00:00:00+00' AND occurred_at < '9999-12-31 00:00:00+00'),
    enqueued_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (lane, position)
) WITH (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 10000,
    autovacuum_vacuum_insert_threshold = -1,
    autovacuum_analyze_scale_factor = 0,
    autovacuum_analyze_threshold = 100000
);

CREATE TABLE relaybox_outbox_aside (
    position        bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    state           text        NOT NULL,
    reason          text        NOT NULL,
    error           text,
    scope           text        COLLATE "C",
    outbox_position bigint,
    due_at          timestamptz,
    attempts        int         NOT NULL DEFAULT 0,
    set_aside_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    lane            int         NOT NULL CHECK (lane BETWEEN 0 AND 15),
    message_id      text        NOT NULL,
    destination     text        COLLATE "C" NOT NULL CHECK (octet_length(destination) <= 1024),
    key             bytea,
    event_type      text        NOT NULL,
    content_type    text,
    headers         text,
    payload         bytea,
    size            int         NOT NULL,
    version         bigint,
    occurred_at     timestamptz NOT NULL
) WITH (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 10000
);

-- Without names, because an index lives in the schema of its table and may not name it. A key may be longer than an
-- index allows, so its hash stands in.
-- Finds the row of a verdict. A hash, so that a planner with stale statistics can read nothing else along it.
CREATE INDEX ON relaybox_outbox_aside USING hash (outbox_position);
-- Finds what may go, destination by destination.
CREATE INDEX ON relaybox_outbox_aside (lane, destination, outbox_position) WHERE state = 'waiting';
-- Finds what is ahead in a scope and key.
CREATE INDEX ON relaybox_outbox_aside (lane, md5(key), scope, outbox_position)
    WHERE state IN ('waiting', 'held', 'blocking') AND key IS NOT NULL;
-- ... and what blocks it.
CREATE INDEX ON relaybox_outbox_aside (lane, md5(key), scope, outbox_position)
    WHERE state IN ('held', 'blocking') AND key IS NOT NULL;
-- Finds what is due.
CREATE INDEX ON relaybox_outbox_aside (due_at) WHERE state = 'delayed';

-- What an operator said about destinations.
CREATE TABLE relaybox_outbox_destination (
    destination text        COLLATE "C" PRIMARY KEY CHECK (octet_length(destination) <= 1024),
    paused      boolean     NOT NULL DEFAULT false,
    rate_max    int         CHECK (rate_max > 0),
    because     text        NOT NULL,
    changed_at  timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE relaybox_outbox_lane (
    lane       int         PRIMARY KEY CHECK (lane BETWEEN 0 AND 15),
    token      bigint      NOT NULL DEFAULT 0,
    owner      text,
    expires_at timestamptz NOT NULL DEFAULT '1970-01-01 00:00:00+00'
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 200
);

INSERT INTO relaybox_outbox_lane (lane) SELECT generate_series(0, 15);

CREATE TABLE relaybox_relay (
    id         text        COLLATE "C" PRIMARY KEY,
    name       text        NOT NULL,
    expires_at timestamptz NOT NULL
) WITH (
    fillfactor = 50,
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 200
);

CREATE TABLE relaybox_inbox (
    consumer    text        NOT NULL,
    message_id  text        NOT NULL,
    recorded_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, message_id)
) WITH (
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000
);

CREATE INDEX ON relaybox_inbox (consumer, recorded_at);

CREATE TABLE relaybox_dead_letter (
    position         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer         text        NOT NULL,
    message_id       text        NOT NULL,
    redrive_count    bigint      NOT NULL,
    reason           text,
    retry_count      bigint      NOT NULL,
    first_failed_at  timestamptz,
    last_failed_at   timestamptz,
    last_error       text,
    origin_topic     text,
    origin_partition text,
    origin_offset    text,
    destination      text        NOT NULL,
    key              bytea,
    event_type       text        NOT NULL,
    content_type     text,
    headers          text,
    payload          bytea,
    size             int         NOT NULL,
    version          bigint,
    occurred_at      timestamptz NOT NULL,
    stored_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    UNIQUE (consumer, message_id, redrive_count)
);

-- Serves a consumer's list, oldest first, and its count.
CREATE INDEX ON relaybox_dead_letter (consumer, position);
