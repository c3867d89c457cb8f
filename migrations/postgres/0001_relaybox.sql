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

-- What was published, where relays are told to keep it. A day has a partition, and 32 days later the same one again, empty
-- by then: so none is ever missing or made under way. Without constraints, because nothing may keep a row from being
-- settled.
CREATE TABLE relaybox_outbox_history (
    published_at timestamptz NOT NULL,
    position     bigint      NOT NULL,
    lane         int         NOT NULL,
    message_id   text        COLLATE "C" NOT NULL,
    destination  text        NOT NULL,
    key          bytea,
    event_type   text        NOT NULL,
    content_type text,
    headers      text,
    payload      bytea,
    size         int         NOT NULL,
    version      bigint,
    occurred_at  timestamptz NOT NULL
) PARTITION BY LIST ((((published_at AT TIME ZONE 'UTC')::date - DATE '2000-01-01') % 32));

-- Finds a message. An id may be longer than an index allows.
CREATE INDEX ON relaybox_outbox_history (left(message_id, 64));
-- Finds what is over.
CREATE INDEX ON relaybox_outbox_history (published_at);

-- A day is never updated, and emptied whole: to vacuum it is in vain.
CREATE TABLE relaybox_outbox_history_00 PARTITION OF relaybox_outbox_history FOR VALUES IN (0)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_01 PARTITION OF relaybox_outbox_history FOR VALUES IN (1)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_02 PARTITION OF relaybox_outbox_history FOR VALUES IN (2)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_03 PARTITION OF relaybox_outbox_history FOR VALUES IN (3)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_04 PARTITION OF relaybox_outbox_history FOR VALUES IN (4)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_05 PARTITION OF relaybox_outbox_history FOR VALUES IN (5)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_06 PARTITION OF relaybox_outbox_history FOR VALUES IN (6)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_07 PARTITION OF relaybox_outbox_history FOR VALUES IN (7)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_08 PARTITION OF relaybox_outbox_history FOR VALUES IN (8)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_09 PARTITION OF relaybox_outbox_history FOR VALUES IN (9)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_10 PARTITION OF relaybox_outbox_history FOR VALUES IN (10)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_11 PARTITION OF relaybox_outbox_history FOR VALUES IN (11)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_12 PARTITION OF relaybox_outbox_history FOR VALUES IN (12)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_13 PARTITION OF relaybox_outbox_history FOR VALUES IN (13)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_14 PARTITION OF relaybox_outbox_history FOR VALUES IN (14)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_15 PARTITION OF relaybox_outbox_history FOR VALUES IN (15)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_16 PARTITION OF relaybox_outbox_history FOR VALUES IN (16)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_17 PARTITION OF relaybox_outbox_history FOR VALUES IN (17)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_18 PARTITION OF relaybox_outbox_history FOR VALUES IN (18)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_19 PARTITION OF relaybox_outbox_history FOR VALUES IN (19)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_20 PARTITION OF relaybox_outbox_history FOR VALUES IN (20)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_21 PARTITION OF relaybox_outbox_history FOR VALUES IN (21)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_22 PARTITION OF relaybox_outbox_history FOR VALUES IN (22)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_23 PARTITION OF relaybox_outbox_history FOR VALUES IN (23)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_24 PARTITION OF relaybox_outbox_history FOR VALUES IN (24)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_25 PARTITION OF relaybox_outbox_history FOR VALUES IN (25)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_26 PARTITION OF relaybox_outbox_history FOR VALUES IN (26)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_27 PARTITION OF relaybox_outbox_history FOR VALUES IN (27)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_28 PARTITION OF relaybox_outbox_history FOR VALUES IN (28)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_29 PARTITION OF relaybox_outbox_history FOR VALUES IN (29)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_30 PARTITION OF relaybox_outbox_history FOR VALUES IN (30)
    WITH (autovacuum_vacuum_insert_threshold = -1);
CREATE TABLE relaybox_outbox_history_31 PARTITION OF relaybox_outbox_history FOR VALUES IN (31)
    WITH (autovacuum_vacuum_insert_threshold = -1);
-- For what has none of them: one was taken away, or the clock stands before 2000.
CREATE TABLE relaybox_outbox_history_other PARTITION OF relaybox_outbox_history DEFAULT
    WITH (autovacuum_vacuum_insert_threshold = -1);

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

-- Work that may end its process, from its start to its end, whichever.
CREATE TABLE relaybox_inbox_start (
    consumer    text        NOT NULL,
    message_id  text        NOT NULL,
    run         text        NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (consumer, message_id)
);

CREATE INDEX ON relaybox_inbox_start (consumer, started_at);

-- updated_at is cut to the hour, so that most updates change no indexed column.
CREATE TABLE relaybox_aggregate_version (
    consumer   text        NOT NULL,
    aggregate  bytea       NOT NULL CHECK (octet_length(aggregate) <= 1024),
    version    bigint      NOT NULL,
    updated_at timestamptz NOT NULL,
    PRIMARY KEY (consumer, aggregate)
) WITH (
    fillfactor = 80,
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 10000
);

CREATE INDEX ON relaybox_aggregate_version (consumer, updated_at);

CREATE TABLE relaybox_dead_letter (
    position         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer         text        NOT NULL,
    message_id       text        NOT NULL,
    redrive_count    bigint      NOT NULL,
    digest           bytea       NOT NULL,
    reason           text,
    retry_count      bigint      NOT NULL,
    first_failed_at  timestamptz,
    last_failed_at   timestamptz,
    last_error       text,
    owner            text,
    note             text,
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
    UNIQUE (consumer, message_id, redrive_count, digest)
);

-- Serves a consumer's list, oldest first, and its count.
CREATE INDEX ON relaybox_dead_letter (consumer, position);

CREATE TABLE relaybox_redrive_run (
    id           bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer     text        NOT NULL,
    operator     text        NOT NULL,
    plan         text        NOT NULL,
    end_position bigint      NOT NULL,
    state        text        NOT NULL DEFAULT 'planned',
    cursor       bigint      NOT NULL DEFAULT 0,
    in_hand      bigint[]    NOT NULL DEFAULT '{}',
    token        bigint      NOT NULL DEFAULT 0,
    sent         bigint      NOT NULL DEFAULT 0,
    refused      bigint      NOT NULL DEFAULT 0,
    rejected     bigint      NOT NULL DEFAULT 0,
    proved       boolean     NOT NULL DEFAULT false,
    error        text,
    planned_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    changed_at   timestamptz NOT NULL DEFAULT clock_timestamp()
);

CREATE INDEX ON relaybox_redrive_run (consumer, id);

CREATE TABLE relaybox_redrive_audit (
    position      bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at            timestamptz NOT NULL DEFAULT clock_timestamp(),
    run           bigint,
    consumer      text        NOT NULL,
    operator      text        NOT NULL,
    verb          text        NOT NULL,
    message_id    text        NOT NULL,
    redrive_count bigint      NOT NULL,
    digest        bytea       NOT NULL,
    outcome       text        NOT NULL,
    detail        text        NOT NULL
);

CREATE INDEX ON relaybox_redrive_audit (consumer, position);

CREATE INDEX ON relaybox_redrive_audit (consumer, at);

-- Finds what has left already.
CREATE INDEX ON relaybox_redrive_audit (consumer, message_id, redrive_count, digest);

-- Messages that wait in the consumer's database for their next attempt, and those of their key behind them.
CREATE TABLE relaybox_waiting (
    position         bigint      GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    consumer         text        COLLATE "C" NOT NULL,
    identity         bytea       NOT NULL CHECK (octet_length(identity) = 16),
    line             bytea       CHECK (octet_length(line) = 16),
    state            text        NOT NULL,
    source           text        NOT NULL,
    due_at           timestamptz,
    visible_at       timestamptz,
    token            bigint      NOT NULL DEFAULT 0,
    claims           int         NOT NULL DEFAULT 0,
    park_to          bigint,
    redrive_count    bigint      NOT NULL,
    reason           text,
    retry_count      bigint      NOT NULL,
    first_failed_at  timestamptz,
    last_failed_at   timestamptz,
    last_error       text,
    origin_topic     text,
    origin_partition text,
    origin_offset    text,
    failed_by        text,
    message_id       text        NOT NULL,
    destination      text        NOT NULL,
    key              bytea,
    event_type       text        NOT NULL,
    content_type     text,
    headers          text,
    payload          bytea,
    version          bigint,
    occurred_at      timestamptz NOT NULL,
    size             int         NOT NULL,
    stored_at        timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- In this order, so that no planner, whatever it believes, finds a consumer's due rows by walking over all of them.
    UNIQUE (identity, consumer)
) WITH (
    autovacuum_vacuum_scale_factor = 0,
    autovacuum_vacuum_threshold = 2000
);

-- Finds what is due: neither what waits for its time nor what waits behind others is in the way.
CREATE INDEX ON relaybox_waiting (consumer, visible_at, position) WHERE state = 'due';
-- Finds the ends of a line.
CREATE INDEX ON relaybox_waiting (consumer, line, position) WHERE line IS NOT NULL;
-- Finds notes that are old.
CREATE INDEX ON relaybox_waiting (consumer, stored_at) WHERE state = 'noted';
