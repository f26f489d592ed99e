"""The ledger in PostgreSQL: its tables, and one function for each operation.

An operation is one call of one function, and so one statement: recorded whole or not at all, with one round trip to the
server. Each function locks the account and all of its ancestors first, in the order of their ids; then the key. Two
operations can therefore wait for each other, but hardly ever deadlock. Because the locks come first, each later
statement of a function sees the state at the time it got them. If the account was put under others while a function
waited for its locks, the function raises a serialization failure, and the operation is repeated.

Putting an account under another locks all its descendants as well, in a mode in which no more can be opened there: a
new account takes its ancestors from its parent.

While calls wait, each change has to admit the next ones, and who is next is decided in Python. Then a function called
with `p_admits` false does nothing and answers `queued`, and the operation is repeated as a transaction: lock the levels
of the account and of all tickets of its tree (`lock_tree`), do the operation, read the tickets (`read_queue`), decide,
and write what was decided (`write_queue`). Tickets change under these locks alone. Leases are measured by the clock of
the server. A call of unknown cost takes the same way where none has ended yet under a ceiling of money.

The arithmetic is that of `containment.accounts`; `tests/storage` compares the two on random operations.
"""

from __future__ import annotations

from penstock.containment.accounts import FIGURES
from penstock.containment.limits import UNLIMITED
from penstock.storage.ledger_rows import CEILINGS

LEDGER = "penstock_ledger"
"""Prefix of all names here; the objects are in the current schema of the connection."""
VERSION = 3
CHANNEL = f"{LEDGER}_queue"
"""Channel of notifications; the payload is the MD5 of the key of a call that has another answer than before."""

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
ROOT_OF = f"(SELECT level FROM {LEDGER}_levels WHERE account = {{}} ORDER BY distance DESC LIMIT 1)"
TREE = f"""SELECT account FROM {LEDGER}_tickets AS waiting WHERE {ROOT_OF.format("waiting.account")} IN ({{}})"""


def unless_queued(*accounts: str) -> str:
    """Return statements that leave a function which does not admit, if calls wait in the trees of these accounts."""
    return f"""
    IF NOT p_admits AND EXISTS (SELECT 1 FROM {LEDGER}_tickets) THEN
        IF EXISTS ({TREE.format(", ".join(map(ROOT_OF.format, accounts)))}) THEN
            RETURN jsonb_build_object('outcome', 'queued');
        END IF;
    END IF;"""


UNLESS_WAITING = f"""
    IF EXISTS (SELECT 1 FROM {LEDGER}_tickets WHERE key = p_key) THEN
        RETURN jsonb_build_object('outcome', 'waits');
    END IF;"""
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
-- For removing an account: references to it are looked up in each of these.
CREATE INDEX {LEDGER}_holds_of ON {LEDGER}_holds (account);
CREATE INDEX {LEDGER}_draws_of ON {LEDGER}_draws (account);
CREATE INDEX {LEDGER}_accounts_above ON {LEDGER}_levels (level);
CREATE INDEX {LEDGER}_accounts_under ON {LEDGER}_accounts (parent);
"""

OF_VERSION_2 = {
    "grant_limits": f"text{', bigint' * len(CEILINGS)}",
    "put_under": "text, text",
    "hold": f"text, text, boolean, boolean{', bigint' * 4}, text, bigint, bigint",
    "end_hold": "text, text, bigint, bigint, bigint, boolean",
    "charge": f"text, text{', bigint' * 4}",
}
"""Arguments of functions that know nothing of tickets: a process that calls them must fail, not pass a waiting call."""

WAITING = f"""
ALTER TABLE {LEDGER}_holds ADD COLUMN under text COLLATE "C";
CREATE INDEX {LEDGER}_held_under ON {LEDGER}_holds (under) WHERE under IS NOT NULL AND state = 'held';
CREATE TABLE {LEDGER}_tickets (
    key text COLLATE "C" PRIMARY KEY,
    account bigint NOT NULL REFERENCES {LEDGER}_accounts (id),
    cost_nanos bigint NOT NULL,
    tokens_in bigint NOT NULL,
    tokens_out bigint NOT NULL,
    api_calls bigint NOT NULL,
    retry_drawn boolean NOT NULL,
    run text NOT NULL,
    owner text NOT NULL,
    under text COLLATE "C",
    number bigint NOT NULL,
    turn bigint NOT NULL,
    passed bigint NOT NULL,
    state text NOT NULL CHECK (state IN ('waiting', 'admitted', 'refused')),
    stop text NOT NULL,
    lease interval NOT NULL,
    expires timestamptz NOT NULL,
    deadline timestamptz NOT NULL
);
CREATE INDEX {LEDGER}_tickets_of ON {LEDGER}_tickets (account);
{"".join(f"DROP FUNCTION IF EXISTS {LEDGER}_{name}({args});" for name, args in OF_VERSION_2.items())}
"""

UNHINTED = f"""
CREATE TABLE IF NOT EXISTS {LEDGER}_unhinted (
    key text COLLATE "C" PRIMARY KEY,
    account bigint NOT NULL REFERENCES {LEDGER}_accounts (id) ON DELETE CASCADE,
    lease interval NOT NULL,
    expires timestamptz NOT NULL
);
CREATE INDEX IF NOT EXISTS {LEDGER}_unhinted_of ON {LEDGER}_unhinted (account);
CREATE TABLE IF NOT EXISTS {LEDGER}_dearest (
    account bigint PRIMARY KEY REFERENCES {LEDGER}_accounts (id) ON DELETE CASCADE,
    cost_nanos bigint NOT NULL
);
"""
"""Model calls without a hint that wait or are held, and the most that one has cost at an account.

Processes that know nothing of these tables may use the others meanwhile: their calls are held as they ask, and the rows
of an account that they remove go with it.
"""

# Not a CHECK: ceilings may be lowered below what was taken. Only taking more must not pass them.
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
CREATE OR REPLACE FUNCTION {LEDGER}_grant_limits(
    p_admits boolean, p_account text, {", ".join(f"p_{name} bigint" for name in CEILINGS)}
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE v_target bigint; v_levels bigint[];
BEGIN
    {LOCK}
    {unless_queued("v_target")}
    UPDATE {LEDGER}_accounts SET {", ".join(f"max_{name} = p_{name}" for name in CEILINGS)} WHERE id = v_target;
    RETURN jsonb_build_object('outcome', 'granted');
END $$;
"""

PUT_UNDER = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_put_under(
    p_admits boolean, p_account text, p_parent text
) RETURNS jsonb LANGUAGE plpgsql AS $$
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
    {unless_queued("v_target", "v_parent")}
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
    p_admits boolean, p_key text, p_account text, p_under text, p_fits boolean, p_retry_drawn boolean,
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
    IF NOT p_admits THEN {UNLESS_WAITING} END IF;
    {unless_queued("v_target")}
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
        VALUES (p_key, v_target, 'held', p_cost, p_tokens_in, p_tokens_out, p_api_calls, p_under)
        ON CONFLICT (key) DO UPDATE SET account = excluded.account, state = 'held', cost_nanos = excluded.cost_nanos,
            tokens_in = excluded.tokens_in, tokens_out = excluded.tokens_out, api_calls = excluded.api_calls,
            under = excluded.under
        WHERE here.state = 'withdrawn';
    IF NOT FOUND THEN RAISE serialization_failure USING MESSAGE = 'the key was taken elsewhere meanwhile'; END IF;
    RETURN jsonb_build_object('outcome', 'held');
END $$;
"""

HOLD_UNHINTED = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_hold_unhinted(
    p_lease_s float8, p_key text, p_account text, p_under text, p_fits boolean, p_retry_drawn boolean,
    p_cost bigint, p_tokens_in bigint, p_tokens_out bigint, p_api_calls bigint,
    p_boot text, p_monotonic_ns bigint, p_wall_ns bigint
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_target bigint; v_levels bigint[]; v_cost bigint; v_limited bigint; v_known bigint; v_answer jsonb;
BEGIN
    {LOCK}
    SELECT count(*), count(known.account), greatest(p_cost, max(known.cost_nanos)) INTO v_limited, v_known, v_cost
        FROM {LEDGER}_accounts AS here LEFT JOIN {LEDGER}_dearest AS known ON known.account = here.id
        WHERE here.id = ANY (v_levels) AND here.max_cost_nanos < {UNLIMITED};
    IF v_known < v_limited THEN RETURN jsonb_build_object('outcome', 'queued'); END IF;
    v_answer := {LEDGER}_hold(false, p_key, p_account, p_under, p_fits, p_retry_drawn,
        v_cost, p_tokens_in, p_tokens_out, p_api_calls, p_boot, p_monotonic_ns, p_wall_ns);
    IF v_limited > 0 AND v_answer ->> 'outcome' = 'held' THEN
        INSERT INTO {LEDGER}_unhinted AS here
            SELECT p_key, v_target, lease, clock_timestamp() + lease FROM make_interval(secs => p_lease_s) AS lease
            ON CONFLICT (key) DO UPDATE
            SET account = excluded.account, lease = excluded.lease, expires = excluded.expires;
    END IF;
    RETURN v_answer || jsonb_build_object('requested', v_cost);
END $$;
"""

RENEW_UNHINTED = f"""
UPDATE {LEDGER}_unhinted AS mine SET expires = clock_timestamp() + lease WHERE key = $1
    AND EXISTS (SELECT 1 FROM {LEDGER}_holds AS held WHERE held.key = mine.key AND state = 'held')
    AND EXISTS (
        SELECT 1 FROM {LEDGER}_levels AS up JOIN {LEDGER}_accounts AS here ON here.id = up.level
        WHERE up.account = mine.account AND here.max_cost_nanos < {UNLIMITED}
        AND NOT EXISTS (SELECT 1 FROM {LEDGER}_dearest AS known WHERE known.account = here.id))
    RETURNING key"""

END = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_end_hold(
    p_admits boolean, p_key text, p_to text, p_cost bigint, p_tokens_in bigint, p_tokens_out bigint, p_succeeded boolean
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_target bigint; v_levels bigint[]; v_known {LEDGER}_holds%ROWTYPE; v_tokens bigint; v_was_held integer;
    v_committed bigint := 0; v_unresolved bigint := 0;
    v_tokens_committed bigint := 0; v_tokens_unresolved bigint := 0; v_tokens_in bigint := 0; v_tokens_out bigint := 0;
    v_steps_taken integer := -1; v_steps_done integer := 0; v_given_back integer := 1; v_api_calls bigint := 0;
    v_is_unhinted boolean;
BEGIN
    SELECT account, EXISTS (SELECT 1 FROM {LEDGER}_unhinted AS mine WHERE mine.key = p_key)
        INTO v_target, v_is_unhinted FROM {LEDGER}_holds WHERE key = p_key;
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
    {unless_queued("v_target")}
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
    IF v_is_unhinted AND p_to = 'settled' THEN
        INSERT INTO {LEDGER}_dearest AS known
            SELECT id, p_cost FROM {LEDGER}_accounts WHERE id = ANY (v_levels) AND max_cost_nanos < {UNLIMITED}
            ON CONFLICT (account) DO UPDATE SET cost_nanos = greatest(known.cost_nanos, excluded.cost_nanos);
    END IF;
    IF v_is_unhinted AND p_to <> 'unresolved' THEN
        DELETE FROM {LEDGER}_unhinted WHERE key = p_key;
    END IF;
    IF p_admits THEN
        DELETE FROM {LEDGER}_tickets WHERE key = p_key;  -- admitted, and its call had not picked it up
        IF FOUND THEN PERFORM pg_notify('{CHANNEL}', md5(p_key)); END IF;
    END IF;
    RETURN jsonb_build_object('outcome', 'done');
END $$;
"""

CHARGE = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_charge(
    p_admits boolean, p_key text, p_account text,
    p_cost bigint, p_tokens_in bigint, p_tokens_out bigint, p_api_calls bigint
) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE v_target bigint; v_levels bigint[]; v_known {LEDGER}_holds%ROWTYPE;
BEGIN
    {LOCK}
    SELECT * INTO v_known FROM {LEDGER}_holds WHERE key = p_key FOR UPDATE;
    IF FOUND THEN RETURN {KNOWN}; END IF;
    {UNLESS_WAITING}
    {unless_queued("v_target")}
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

LOCK_TREE = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_lock_tree(p_accounts text[], p_key text) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE v_targets bigint[]; v_levels bigint[]; v_locked bigint[] := '{{}}';
BEGIN
    v_targets := ARRAY(
        SELECT id FROM {LEDGER}_accounts WHERE name = ANY (p_accounts) ORDER BY array_position(p_accounts, name));
    IF p_key IS NOT NULL THEN
        v_targets := v_targets || ARRAY(
            SELECT account FROM {LEDGER}_tickets WHERE key = p_key
            UNION SELECT account FROM {LEDGER}_holds WHERE key = p_key);
    END IF;
    LOOP
        v_levels := ARRAY(SELECT DISTINCT level FROM {LEDGER}_levels WHERE account = ANY (v_targets) OR account IN (
            {TREE.format(f"SELECT {ROOT_OF.format('target')} FROM unnest(v_targets) AS target")}) ORDER BY level);
        EXIT WHEN v_locked @> v_levels;
        SELECT array_agg(id) INTO v_locked FROM (
            SELECT id FROM {LEDGER}_accounts WHERE id = ANY (v_levels) ORDER BY id FOR NO KEY UPDATE) AS locked;
    END LOOP;
    RETURN v_targets[1];
END $$;
"""

HOLD_COLUMNS = "key, account, cost_nanos, tokens_in, tokens_out, api_calls, under"
READ_QUEUE = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_read_queue(p_target bigint, p_key text, p_under text)
RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE
    v_known {LEDGER}_holds%ROWTYPE; v_tickets jsonb; v_holds jsonb; v_above text[]; v_accounts bigint[];
    v_unhinted text[] := ARRAY(
        SELECT key FROM {LEDGER}_unhinted AS mine WHERE mine.expires > clock_timestamp()
        AND EXISTS (SELECT 1 FROM {LEDGER}_holds AS held WHERE held.key = mine.key AND held.state = 'held')
        AND {ROOT_OF.format("mine.account")} = {ROOT_OF.format("p_target")});
BEGIN
    SELECT * INTO v_known FROM {LEDGER}_holds WHERE key = p_key;
    SELECT coalesce(jsonb_agg(to_jsonb(waiting) || jsonb_build_object(
            'is_expired', waiting.expires <= clock_timestamp(), 'name', here.name, 'unhinted_lease_s', (
                SELECT extract(epoch FROM mine.lease) FROM {LEDGER}_unhinted AS mine WHERE mine.key = waiting.key)
            ) ORDER BY waiting.number), '[]')
        INTO v_tickets FROM {LEDGER}_tickets AS waiting JOIN {LEDGER}_accounts AS here ON here.id = waiting.account
        WHERE {ROOT_OF.format("waiting.account")} = {ROOT_OF.format("p_target")};
    WITH RECURSIVE above (key, under) AS (
        SELECT key, under FROM {LEDGER}_holds WHERE state = 'held' AND (
            key = p_under OR key = ANY (v_unhinted)
            OR key IN (SELECT ticket ->> 'under' FROM jsonb_array_elements(v_tickets) AS ticket))
        UNION SELECT held.key, held.under FROM above JOIN {LEDGER}_holds AS held ON held.key = above.under
            WHERE held.state = 'held')
        SELECT array_agg(key) INTO v_above FROM above;
    SELECT coalesce(jsonb_agg(to_jsonb(held)), '[]') INTO v_holds FROM (
        SELECT {HOLD_COLUMNS} FROM {LEDGER}_holds WHERE state = 'held' AND key = ANY (v_above)
        UNION SELECT {HOLD_COLUMNS} FROM {LEDGER}_holds
            WHERE state = 'held' AND under IS NOT NULL AND under = ANY (v_above)) AS held;
    v_accounts := p_target || ARRAY(
        SELECT (one ->> 'account')::bigint FROM jsonb_array_elements(v_tickets || v_holds) AS one);
    RETURN jsonb_build_object(
        'known', CASE WHEN v_known.key IS NULL THEN NULL ELSE {KNOWN} END,
        'ticket', (
            SELECT to_jsonb(waiting) || jsonb_build_object('name', here.name) FROM {LEDGER}_tickets AS waiting
            JOIN {LEDGER}_accounts AS here ON here.id = waiting.account WHERE waiting.key = p_key),
        'tickets', v_tickets, 'holds', v_holds, 'unhinted', v_unhinted, 'accounts', (
            SELECT jsonb_agg(to_jsonb(here) || jsonb_build_object('dearest', (
                SELECT known.cost_nanos FROM {LEDGER}_dearest AS known WHERE known.account = here.id)))
            FROM {LEDGER}_accounts AS here WHERE here.id IN (
                SELECT level FROM {LEDGER}_levels WHERE account = ANY (v_accounts))));
END $$;
"""

AMOUNTS = "cost_nanos", "tokens_in", "tokens_out", "api_calls"
TICKET_FIELDS = (
    *("key", "retry_drawn", "run", "owner", "under", "number", "turn", "passed", "state", "stop"),
    "unhinted_lease_s",
)
TICKET_RECORD = f"""AS given (key text, account bigint, name text, {", ".join(f"{name} bigint" for name in AMOUNTS)},
        retry_drawn boolean, run text, owner text, under text, number bigint, turn bigint, passed bigint, state text,
        stop text, lease_s float8, max_wait_s float8, unhinted_lease_s float8)"""
WRITE_QUEUE = f"""
CREATE OR REPLACE FUNCTION {LEDGER}_write_queue(
    p_withdrawn text[], p_holds jsonb, p_removed text[], p_changed jsonb, p_joined jsonb, p_renewed text,
    p_woken text[], p_boot text, p_monotonic_ns bigint, p_wall_ns bigint
) RETURNS void LANGUAGE plpgsql AS $$
DECLARE v_key text; v_hold record; v_now timestamptz := clock_timestamp();
BEGIN
    FOREACH v_key IN ARRAY p_withdrawn LOOP
        PERFORM {LEDGER}_end_hold(true, v_key, 'withdrawn', 0, 0, 0, false);
    END LOOP;
    FOR v_hold IN SELECT * FROM jsonb_to_recordset(p_holds) {TICKET_RECORD} LOOP
        IF {LEDGER}_hold(true, v_hold.key, v_hold.name, v_hold.under, true, v_hold.retry_drawn,
                {", ".join(f"v_hold.{name}" for name in AMOUNTS)}, p_boot, p_monotonic_ns, p_wall_ns)
                ->> 'outcome' <> 'held' THEN
            RAISE serialization_failure USING MESSAGE = 'a call was admitted where there is no room for it';
        END IF;
    END LOOP;
    DELETE FROM {LEDGER}_tickets WHERE key = ANY (p_removed);
    UPDATE {LEDGER}_tickets AS waiting SET passed = given.passed, state = given.state, stop = given.stop
        FROM jsonb_to_recordset(p_changed) {TICKET_RECORD} WHERE waiting.key = given.key;
    INSERT INTO {LEDGER}_tickets
        SELECT given.key, account, {", ".join(AMOUNTS)}, retry_drawn, run, owner, under, number, turn, passed, state,
            stop, make_interval(secs => lease_s), v_now + make_interval(secs => least(lease_s, max_wait_s)),
            v_now + make_interval(secs => max_wait_s)
        FROM jsonb_to_recordset(p_joined) {TICKET_RECORD};
    DELETE FROM {LEDGER}_unhinted AS mine WHERE key = ANY (p_removed)
        AND NOT EXISTS (SELECT 1 FROM {LEDGER}_holds AS held WHERE held.key = mine.key AND held.state = 'held');
    INSERT INTO {LEDGER}_unhinted AS mine
        SELECT given.key, account, lease, v_now + lease
        FROM jsonb_to_recordset(p_holds || p_joined) {TICKET_RECORD}, make_interval(secs => unhinted_lease_s) AS lease
        WHERE unhinted_lease_s IS NOT NULL
        ON CONFLICT (key) DO UPDATE SET account = excluded.account, lease = excluded.lease, expires = excluded.expires;
    UPDATE {LEDGER}_tickets SET expires = least(v_now + lease, deadline) WHERE key = p_renewed;
    PERFORM pg_notify('{CHANNEL}', md5(woken)) FROM unnest(p_woken) AS woken;
END $$;
"""

FUNCTIONS = (
    OPEN_ACCOUNT,
    GRANT,
    PUT_UNDER,
    HOLD,
    HOLD_UNHINTED,
    END,
    CHARGE,
    DRAW_RETRY,
    LOCK_TREE,
    READ_QUEUE,
    WRITE_QUEUE,
)
STATEMENTS = (TABLES, WAITING, UNHINTED, WITHIN_CEILINGS, *FUNCTIONS)
OLDER_VERSIONS = (1, 2)
ADDITIONS = (UNHINTED, *FUNCTIONS)
"""Statements that add what processes of this version can do without, where it is missing."""
UPGRADE = (WAITING, *ADDITIONS, f"UPDATE {LEDGER}_about SET version = {VERSION}")
"""Statements that bring tables of an older version to this one: the older ones differ in their functions alone."""

SELECT_ACCOUNT = f"SELECT {COLUMNS} FROM {LEDGER}_accounts WHERE name = $1"
SELECT_ACCOUNTS = f"SELECT {COLUMNS} FROM {LEDGER}_accounts WHERE name = ANY($1::text[])"
SELECT_OPEN_HOLDS = f"""SELECT key, cost_nanos, tokens_in, tokens_out, api_calls FROM {LEDGER}_holds
    WHERE state IN ('held', 'unresolved') AND state = $1 AND starts_with(key, $2)"""
SELECT_QUEUED = f"""SELECT key, cost_nanos, tokens_in, tokens_out, api_calls FROM {LEDGER}_tickets
    WHERE starts_with(key, $1) ORDER BY number"""
SELECT_TICKET = f"""SELECT state, stop, number, expires > clock_timestamp() + lease / 2 AS is_fresh
    FROM {LEDGER}_tickets WHERE key = $1"""
SELECT_OPENED = f"""SELECT name, opened_boot, opened_monotonic_ns, opened_wall_ns FROM {LEDGER}_accounts
    WHERE id > CASE WHEN $1::text IS NULL THEN 0 ELSE (SELECT id FROM {LEDGER}_accounts WHERE name = $1) END
    AND starts_with(name, $3) ORDER BY id LIMIT $2"""
FORGET = f"""WITH gone AS (
        SELECT id FROM {LEDGER}_accounts AS here WHERE name = ANY ($1)
        AND NOT EXISTS (SELECT 1 FROM {LEDGER}_accounts AS below WHERE below.parent = here.id)
        AND NOT EXISTS (SELECT 1 FROM {LEDGER}_holds WHERE account = here.id AND state = 'held')
        AND NOT EXISTS (SELECT 1 FROM {LEDGER}_tickets WHERE account = here.id)
        ORDER BY id FOR UPDATE),
    no_holds AS (DELETE FROM {LEDGER}_holds WHERE account IN (SELECT id FROM gone)),
    no_draws AS (DELETE FROM {LEDGER}_draws WHERE account IN (SELECT id FROM gone)),
    no_levels AS (DELETE FROM {LEDGER}_levels WHERE account IN (SELECT id FROM gone))
    DELETE FROM {LEDGER}_accounts WHERE id IN (SELECT id FROM gone) RETURNING id"""
"""One statement, like every operation; a concurrent new hold makes it fail, since its account must exist."""
