"""The ledger in PostgreSQL: its tables, and one function for each act.

An act is one call of one function, so that it is one statement: recorded whole or not at all, with one journey to the
server. Each function locks the account and all of its ancestors first, in the order of their ids; then the key. Two
acts can therefore wait for each other, and hardly ever in a circle. Because the locks come first, each later statement
of a function sees what was there when it had them. Should the account have been put under others while a function
waited for its locks, it gives up with a serialization failure, and is asked again.

Whoever puts an account under another locks all that are under it as well, and so that no more can be opened there: what
is opened below takes its ancestors from its parent.

The arithmetic is that of `containment.accounts`; `tests/storage` compares the two on random acts.
"""

from __future__ import annotations

from penstock.containment.accounts import FIGURES
from penstock.containment.limits import UNLIMITED
from penstock.storage.ledger_rows import CEILINGS

LEDGER = "penstock_ledger"
"""What everything here begins with; it stands in the schema that the connection works in."""
VERSION = 2

COLUMNS = ", ".join(
    ("name", "opened_boot", "opened_monotonic_ns", "opened_wall_ns", *(f"max_{name}" for name in CEILINGS), *FIGURES)
)
LEVELS_OF = f"SELECT level FROM {LEDGER}_levels WHERE account = v_target"
LOCK_LEVELS = f"""
    SELECT array_agg(id) INTO v_levels FROM (
        SELECT id FROM {LEDGER}_accounts WHERE id IN ({LEVELS_OF}) ORDER BY id FOR NO KEY UPDATE) AS locked;
    IF v_levels <> ARRAY({LEVELS_OF} ORDER BY level) THEN
        RAISE serialization_failure USING MESSAGE = 'the account was put under others meanwhile';
    END IF;"""
LOCK = f"""
    SELECT id INTO v_target FROM {LEDGER}_accounts WHERE name = p_account;
    IF v_target IS NULL THEN RETURN jsonb_build_object('outcome', 'no account'); END IF;
    {LOCK_LEVELS}"""
TOUCHED = f"""SELECT level FROM {LEDGER}_levels WHERE account IN (v_target, v_parent)
                UNION SELECT account FROM {LEDGER}_levels WHERE level = v_target"""
KNOWN = f"""jsonb_build_object('outcome', CASE v_known.state WHEN 'charged' THEN 'charged' ELSE 'known' END,
        'state', v_known.state, 'name', (SELECT name FROM {LEDGER}_accounts WHERE id = v_known.account),
        'cost_nanos', v_known.cost_nanos, 'tokens_in', v_known.tokens_in, 'tokens_out', v_known.tokens_out,
        'api_calls', v_known.api_calls)"""

TABLES = f"""
CREATE TABLE {LEDGER}_about (version integer NOT NULL);
INSERT INTO {LEDGER}_about VALUES ({VERSION});
CREATE TABLE {LEDGER}_accounts (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text COLLATE "C" NOT NULL UNIQUE,
    parent bigint REFERENCES {LEDGER}_accounts (id),
    opened_boot text NOT NULL,
    opened_monotonic_ns bigint NOT NULL,
    opened_wall_ns bigint NOT NULL,
    {", ".join(f"max_{name} bigint NOT NULL CHECK (max_{name} >= 0)" for name in CEILINGS)},
    {", ".join(f"{name} bigint NOT NULL DEFAULT 0 CHECK ({name} >= 0)" for name in FIGURES)},
    CHECK (committed >= held + unresolved),
    CHECK (tokens_committed = tokens_in + tokens_out + tokens_held + tokens_unresolved),
    CHECK (steps_done <= steps_taken)
) WITH (fillfactor = 50);
CREATE TABLE {LEDGER}_levels (
    account bigint NOT NULL REFERENCES {LEDGER}_accounts (id),
    distance integer NOT NULL,
    level bigint NOT NULL REFERENCES {LEDGER}_accounts (id),
    PRIMARY KEY (account, distance)
);
CREATE TABLE {LEDGER}_holds (
    key text COLLATE "C" PRIMARY KEY,
    account bigint NOT NULL REFERENCES {LEDGER}_accounts (id),
    state text NOT NULL CHECK (state IN ('held', 'settled', 'released', 'withdrawn', 'unresolved', 'charged')),
    cost_nanos bigint NOT NULL,
    tokens_in bigint NOT NULL,
    tokens_out bigint NOT NULL,
    api_calls bigint NOT NULL
);
CREATE INDEX {LEDGER}_open_holds ON {LEDGER}_holds (state) WHERE state IN ('held', 'unresolved');
CREATE TABLE {LEDGER}_draws (
    key text COLLATE "C" PRIMARY KEY,
    account bigint NOT NULL REFERENCES {LEDGER}_accounts (id)
);
-- For forgetting an account: who refers to it is looked for in each of these.
CREATE INDEX {LEDGER}_holds_of ON {LEDGER}_holds (account);
CREATE INDEX {LEDGER}_draws_of ON {LEDGER}_draws (account);
CREATE INDEX {LEDGER}_accounts_above ON {LEDGER}_levels (level);
CREATE INDEX {LEDGER}_accounts_under ON {LEDGER}_accounts (parent);
"""

# No check: ceilings may be lowered below what was taken. It is the taking that may not pass them.
WITHIN_CEILINGS = f"""
CREATE FUNCTION {LEDGER}_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE check_violation USING MESSAGE = 'more steps or retries than the account has';
END $$;
CREATE TRIGGER within_ceilings BEFORE UPDATE OF steps_taken, retries ON {LEDGER}_accounts FOR EACH ROW
    WHEN (NEW.steps_taken > greatest(OLD.steps_taken, NEW.max_steps)
          OR NEW.retries > greatest(OLD.retries, NEW.max_retries))
    EXECUTE FUNCTION {LEDGER}_refuse();
"""

OPEN_ACCOUNT = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_open_account(
    p_account text, p_parent text, p_boot text, p_monotonic_ns bigint, p_wall_ns bigint,
    {", ".join(f"p_{name} bigint" for name in CEILINGS)}
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE v_parent bigint; v_target bigint;
BEGIN
    IF p_parent IS NOT NULL THEN
        SELECT id INTO v_parent FROM {LEDGER}_accounts WHERE name = p_parent;
        IF v_parent IS NULL THEN RETURN jsonb_build_object('outcome', 'no parent'); END IF;
    END IF;
    IF EXISTS (SELECT 1 FROM {LEDGER}_accounts WHERE name = p_account AND parent IS NOT DISTINCT FROM v_parent
               AND {" AND ".join(f"max_{name} = p_{name}" for name in CEILINGS)}) THEN
        RETURN jsonb_build_object('outcome', 'same');
    END IF;
    INSERT INTO {LEDGER}_accounts
        (name, parent, opened_boot, opened_monotonic_ns, opened_wall_ns, {", ".join(f"max_{n}" for n in CEILINGS)})
        VALUES (p_account, v_parent, p_boot, p_monotonic_ns, p_wall_ns, {", ".join(f"p_{n}" for n in CEILINGS)})
        ON CONFLICT (name) DO NOTHING RETURNING id INTO v_target;
    IF v_target IS NULL THEN
        RETURN jsonb_build_object('outcome', CASE WHEN EXISTS (
            SELECT 1 FROM {LEDGER}_accounts WHERE name = p_account AND parent IS NOT DISTINCT FROM v_parent
            AND {" AND ".join(f"max_{name} = p_{name}" for name in CEILINGS)}) THEN 'same' ELSE 'other' END);
    END IF;
    INSERT INTO {LEDGER}_levels (account, distance, level)
        SELECT v_target, 0, v_target
        UNION ALL SELECT v_target, distance + 1, level FROM {LEDGER}_levels WHERE account = v_parent;
    RETURN jsonb_build_object('outcome', 'made');
END $$;
"""

GRANT = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_grant_limits(p_account text, {", ".join(f"p_{name} bigint" for name in CEILINGS)})
RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE v_target bigint; v_levels bigint[];
BEGIN
    {LOCK}
    UPDATE {LEDGER}_accounts SET {", ".join(f"max_{name} = p_{name}" for name in CEILINGS)} WHERE id = v_target;
    RETURN jsonb_build_object('outcome', 'granted');
END $$;
"""

PUT_UNDER = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_put_under(p_account text, p_parent text) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_target bigint; v_parent bigint; v_locked bigint[]; v_own bigint[]; v_new bigint[];
    v_known {LEDGER}_accounts%ROWTYPE; v_level record;
BEGIN
    SELECT id INTO v_target FROM {LEDGER}_accounts WHERE name = p_account;
    IF v_target IS NULL THEN RETURN jsonb_build_object('outcome', 'no account'); END IF;
    SELECT id INTO v_parent FROM {LEDGER}_accounts WHERE name = p_parent;
    IF v_parent IS NULL THEN RETURN jsonb_build_object('outcome', 'no parent'); END IF;
    IF v_target <> v_parent AND v_parent IN ({LEVELS_OF}) THEN RETURN jsonb_build_object('outcome', 'done'); END IF;
    LOOP
        SELECT array_agg(id) INTO v_locked FROM (
            SELECT id FROM {LEDGER}_accounts WHERE id IN ({TOUCHED}) ORDER BY id FOR UPDATE) AS locked;
        EXIT WHEN v_locked @> ARRAY({TOUCHED});
    END LOOP;
    v_own := ARRAY({LEVELS_OF});
    v_new := ARRAY(SELECT level FROM {LEDGER}_levels WHERE account = v_parent);
    SELECT * INTO v_known FROM {LEDGER}_accounts WHERE id = v_target;
    IF v_target = ANY (v_new) THEN RETURN jsonb_build_object('outcome', 'above'); END IF;
    IF v_parent = ANY (v_own) THEN RETURN jsonb_build_object('outcome', 'done'); END IF;
    IF v_known.parent <> ALL (v_new) THEN
        RETURN jsonb_build_object('outcome', 'other', 'name', (
            SELECT name FROM {LEDGER}_accounts WHERE id = v_known.parent));
    END IF;
    FOR v_level IN SELECT id, max_steps, max_retries FROM {LEDGER}_accounts
                   WHERE id = ANY (v_new) AND id <> ALL (v_own) LOOP
        UPDATE {LEDGER}_accounts SET max_steps = {UNLIMITED}, max_retries = {UNLIMITED},
            {", ".join(f"{name} = {name} + v_known.{name}" for name in FIGURES)} WHERE id = v_level.id;
        UPDATE {LEDGER}_accounts SET max_steps = v_level.max_steps, max_retries = v_level.max_retries
            WHERE id = v_level.id;
    END LOOP;
    DELETE FROM {LEDGER}_levels WHERE level = ANY (v_own) AND level <> v_target
        AND account IN (SELECT account FROM {LEDGER}_levels WHERE level = v_target);
    INSERT INTO {LEDGER}_levels (account, distance, level)
        SELECT below.account, below.distance + 1 + above.distance, above.level
        FROM {LEDGER}_levels AS below, {LEDGER}_levels AS above
        WHERE below.level = v_target AND above.account = v_parent;
    UPDATE {LEDGER}_accounts SET parent = v_parent WHERE id = v_target;
    RETURN jsonb_build_object('outcome', 'done');
END $$;
"""

HOLD = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_hold(
    p_key text, p_account text, p_fits boolean, p_retry_drawn boolean,
    p_cost bigint, p_tokens_in bigint, p_tokens_out bigint, p_api_calls bigint,
    p_boot text, p_monotonic_ns bigint, p_wall_ns bigint
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_target bigint; v_levels bigint[]; v_known {LEDGER}_holds%ROWTYPE;
    v_tokens bigint := p_tokens_in + p_tokens_out;
BEGIN
    {LOCK}
    SELECT * INTO v_known FROM {LEDGER}_holds WHERE key = p_key FOR UPDATE;
    IF FOUND AND v_known.state <> 'withdrawn' THEN RETURN {KNOWN}; END IF;
    IF NOT p_fits OR EXISTS (
        SELECT 1 FROM {LEDGER}_accounts AS here WHERE here.id = ANY (v_levels) AND (
            here.committed::numeric + greatest(p_cost, 1) > here.max_cost_nanos
            OR here.steps_taken >= here.max_steps
            OR here.tokens_committed::numeric + greatest(v_tokens, 1) > here.max_tokens
            OR here.api_calls::numeric + greatest(p_api_calls, 1) > here.max_api_calls
            OR (here.retries >= here.max_retries AND NOT p_retry_drawn)
            OR greatest(0, CASE here.opened_boot WHEN p_boot THEN p_monotonic_ns - here.opened_monotonic_ns
                           ELSE p_wall_ns - here.opened_wall_ns END) >= here.max_time_ns)
    ) THEN
        RETURN jsonb_build_object('outcome', 'refused', 'levels', (
            SELECT jsonb_agg(to_jsonb(here) ORDER BY up.distance) FROM {LEDGER}_levels AS up
            JOIN {LEDGER}_accounts AS here ON here.id = up.level WHERE up.account = v_target));
    END IF;
    UPDATE {LEDGER}_accounts SET
        committed = committed + p_cost, held = held + p_cost, steps_taken = steps_taken + 1,
        tokens_committed = tokens_committed + v_tokens, tokens_held = tokens_held + v_tokens,
        api_calls = api_calls + p_api_calls
        WHERE id = ANY (v_levels);
    INSERT INTO {LEDGER}_holds AS here
        VALUES (p_key, v_target, 'held', p_cost, p_tokens_in, p_tokens_out, p_api_calls)
        ON CONFLICT (key) DO UPDATE SET account = excluded.account, state = 'held', cost_nanos = excluded.cost_nanos,
            tokens_in = excluded.tokens_in, tokens_out = excluded.tokens_out, api_calls = excluded.api_calls
        WHERE here.state = 'withdrawn';
    IF NOT FOUND THEN RAISE serialization_failure USING MESSAGE = 'the key was taken elsewhere meanwhile'; END IF;
    RETURN jsonb_build_object('outcome', 'held');
END $$;
"""

END = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_end_hold(
    p_key text, p_to text, p_cost bigint, p_tokens_in bigint, p_tokens_out bigint, p_succeeded boolean
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_target bigint; v_levels bigint[]; v_known {LEDGER}_holds%ROWTYPE; v_tokens bigint; v_was_held integer;
    v_committed bigint := 0; v_unresolved bigint := 0;
    v_tokens_committed bigint := 0; v_tokens_unresolved bigint := 0; v_tokens_in bigint := 0; v_tokens_out bigint := 0;
    v_steps_taken integer := -1; v_steps_done integer := 0; v_given_back integer := 1; v_api_calls bigint := 0;
BEGIN
    SELECT account INTO v_target FROM {LEDGER}_holds WHERE key = p_key;
    IF v_target IS NULL THEN RETURN jsonb_build_object('outcome', 'no hold'); END IF;
    {LOCK_LEVELS}
    SELECT * INTO v_known FROM {LEDGER}_holds WHERE key = p_key FOR UPDATE;
    IF v_known.account <> v_target THEN
        RAISE serialization_failure USING MESSAGE = 'the key was taken elsewhere meanwhile';
    END IF;
    IF v_known.state = p_to THEN RETURN jsonb_build_object('outcome', 'done'); END IF;
    IF NOT (v_known.state = 'held' OR (v_known.state = 'unresolved' AND p_to IN ('settled', 'released'))) THEN
        RETURN jsonb_build_object('outcome', 'cannot', 'state', v_known.state);
    END IF;
    v_was_held := CASE v_known.state WHEN 'held' THEN 1 ELSE 0 END;
    v_tokens := v_known.tokens_in + v_known.tokens_out;
    IF p_to = 'unresolved' THEN
        v_unresolved := v_known.cost_nanos;
        v_tokens_unresolved := v_tokens;
    ELSE
        v_committed := p_cost - v_known.cost_nanos;
        v_tokens_committed := p_tokens_in + p_tokens_out - v_tokens;
        v_tokens_in := p_tokens_in;
        v_tokens_out := p_tokens_out;
        v_unresolved := (v_was_held - 1) * v_known.cost_nanos;
        v_tokens_unresolved := (v_was_held - 1) * v_tokens;
    END IF;
    IF p_to = 'settled' AND p_succeeded THEN
        v_steps_taken := 0;
        v_steps_done := 1;
        v_given_back := 0;
    ELSIF p_to = 'withdrawn' THEN
        v_given_back := 0;
        v_api_calls := -v_known.api_calls;
    END IF;
    UPDATE {LEDGER}_accounts SET
        committed = committed + v_committed,
        held = held - v_was_held * v_known.cost_nanos,
        unresolved = unresolved + v_unresolved,
        steps_taken = steps_taken + v_was_held * v_steps_taken,
        steps_done = steps_done + v_was_held * v_steps_done,
        steps_given_back = steps_given_back + v_was_held * v_given_back,
        tokens_committed = tokens_committed + v_tokens_committed,
        tokens_held = tokens_held - v_was_held * v_tokens,
        tokens_unresolved = tokens_unresolved + v_tokens_unresolved,
        tokens_in = tokens_in + v_tokens_in,
        tokens_out = tokens_out + v_tokens_out,
        api_calls = api_calls + v_api_calls
        WHERE id = ANY (v_levels);
    UPDATE {LEDGER}_holds SET state = p_to WHERE key = p_key;
    RETURN jsonb_build_object('outcome', 'done');
END $$;
"""

CHARGE = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_charge(
    p_key text, p_account text, p_cost bigint, p_tokens_in bigint, p_tokens_out bigint, p_api_calls bigint
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE v_target bigint; v_levels bigint[]; v_known {LEDGER}_holds%ROWTYPE;
BEGIN
    {LOCK}
    SELECT * INTO v_known FROM {LEDGER}_holds WHERE key = p_key FOR UPDATE;
    IF FOUND THEN RETURN {KNOWN}; END IF;
    INSERT INTO {LEDGER}_holds VALUES (p_key, v_target, 'charged', p_cost, p_tokens_in, p_tokens_out, p_api_calls)
        ON CONFLICT (key) DO NOTHING;
    IF NOT FOUND THEN RAISE serialization_failure USING MESSAGE = 'the key was taken elsewhere meanwhile'; END IF;
    UPDATE {LEDGER}_accounts SET
        committed = committed + p_cost, tokens_committed = tokens_committed + p_tokens_in + p_tokens_out,
        tokens_in = tokens_in + p_tokens_in, tokens_out = tokens_out + p_tokens_out, api_calls = api_calls + p_api_calls
        WHERE id = ANY (v_levels);
    RETURN jsonb_build_object('outcome', 'made');
END $$;
"""

DRAW_RETRY = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_draw_retry(p_account text, p_key text) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE v_target bigint; v_levels bigint[]; v_known bigint;
BEGIN
    {LOCK}
    SELECT account INTO v_known FROM {LEDGER}_draws WHERE key = p_key;
    IF FOUND THEN
        RETURN jsonb_build_object('outcome', 'drawn', 'name', (SELECT name FROM {LEDGER}_accounts WHERE id = v_known));
    END IF;
    IF EXISTS (SELECT 1 FROM {LEDGER}_accounts WHERE id = ANY (v_levels) AND retries >= max_retries) THEN
        RETURN jsonb_build_object('outcome', 'none left');
    END IF;
    UPDATE {LEDGER}_accounts SET retries = retries + 1 WHERE id = ANY (v_levels);
    IF p_key IS NOT NULL THEN
        INSERT INTO {LEDGER}_draws VALUES (p_key, v_target) ON CONFLICT (key) DO NOTHING;
        IF NOT FOUND THEN RAISE serialization_failure USING MESSAGE = 'the key was taken elsewhere meanwhile'; END IF;
    END IF;
    RETURN jsonb_build_object('outcome', 'drawn', 'name', p_account);
END $$;
"""

FUNCTIONS = (OPEN_ACCOUNT, GRANT, PUT_UNDER, HOLD, END, CHARGE, DRAW_RETRY)
STATEMENTS = (TABLES, WITHIN_CEILINGS, *FUNCTIONS)

SELECT_ACCOUNT = f"SELECT {COLUMNS} FROM {LEDGER}_accounts WHERE name = $1"
SELECT_OPEN_HOLDS = f"""SELECT key, cost_nanos, tokens_in, tokens_out, api_calls FROM {LEDGER}_holds
    WHERE state IN ('held', 'unresolved') AND state = $1 AND starts_with(key, $2)"""
SELECT_OPENED = f"""SELECT name, opened_boot, opened_monotonic_ns, opened_wall_ns FROM {LEDGER}_accounts
    WHERE id > CASE WHEN $1::text IS NULL THEN 0 ELSE (SELECT id FROM {LEDGER}_accounts WHERE name = $1) END
    ORDER BY id LIMIT $2"""
FORGET = f"""WITH gone AS (
        SELECT id FROM {LEDGER}_accounts AS here WHERE name = ANY ($1)
        AND NOT EXISTS (SELECT 1 FROM {LEDGER}_accounts AS below WHERE below.parent = here.id)
        AND NOT EXISTS (SELECT 1 FROM {LEDGER}_holds WHERE account = here.id AND state = 'held')
        ORDER BY id FOR UPDATE),
    no_holds AS (DELETE FROM {LEDGER}_holds WHERE account IN (SELECT id FROM gone)),
    no_draws AS (DELETE FROM {LEDGER}_draws WHERE account IN (SELECT id FROM gone)),
    no_levels AS (DELETE FROM {LEDGER}_levels WHERE account IN (SELECT id FROM gone))
    DELETE FROM {LEDGER}_accounts WHERE id IN (SELECT id FROM gone) RETURNING id"""
"""One statement, as every act; a hold that came meanwhile makes it fail, for its account may not be missing."""
