-- The schema of version 4 as the last program of that version made it in PostgreSQL 15 (pg_dump --schema-only).
CREATE TABLE public.attempts (
    rollout_id text NOT NULL COLLATE pg_catalog."C",
    attempt bigint NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C",
    worker_id text NOT NULL COLLATE pg_catalog."C",
    token text NOT NULL COLLATE pg_catalog."C",
    lease_expires_ns bigint NOT NULL,
    started_ns bigint NOT NULL,
    finished_ns bigint,
    error text COLLATE pg_catalog."C",
    output text COLLATE pg_catalog."C",
    CONSTRAINT state_is_known CHECK ((state = ANY (ARRAY['running'::text, 'succeeded'::text, 'failed'::text, 'timed_out'::text, 'lost'::text])))
);

CREATE TABLE public.calls (
    id text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    rollout_id text NOT NULL COLLATE pg_catalog."C",
    attempt bigint NOT NULL,
    parent_id text COLLATE pg_catalog."C",
    suffix_ids bytea NOT NULL,
    sampled_ids bytea NOT NULL,
    logprobs bytea NOT NULL,
    versions text NOT NULL COLLATE pg_catalog."C",
    prompt_tokens bigint NOT NULL,
    policy text NOT NULL COLLATE pg_catalog."C",
    model text NOT NULL COLLATE pg_catalog."C",
    protocol text NOT NULL COLLATE pg_catalog."C",
    sampling text NOT NULL COLLATE pg_catalog."C",
    history_hash text NOT NULL COLLATE pg_catalog."C",
    request_hash text NOT NULL COLLATE pg_catalog."C",
    messages text NOT NULL COLLATE pg_catalog."C",
    answer text NOT NULL COLLATE pg_catalog."C",
    tools text COLLATE pg_catalog."C",
    fork_cause text COLLATE pg_catalog."C",
    context_only bigint DEFAULT '0'::bigint NOT NULL,
    asked text DEFAULT '{}'::text NOT NULL COLLATE pg_catalog."C",
    usage text DEFAULT '{}'::text NOT NULL COLLATE pg_catalog."C",
    agent text COLLATE pg_catalog."C",
    finish_reason text NOT NULL COLLATE pg_catalog."C",
    started_ns bigint NOT NULL,
    finished_ns bigint NOT NULL,
    span_id text COLLATE pg_catalog."C",
    CONSTRAINT one_logprob_a_sampled_token CHECK ((length(logprobs) = length(sampled_ids)))
);

CREATE TABLE public.checkpoints (
    run_id text NOT NULL COLLATE pg_catalog."C",
    step bigint NOT NULL,
    path text NOT NULL COLLATE pg_catalog."C",
    version bigint NOT NULL,
    created_ns bigint NOT NULL
);

CREATE TABLE public.consumption (
    rollout_id text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    mode text DEFAULT 'train'::text NOT NULL COLLATE pg_catalog."C",
    step_id bigint NOT NULL,
    "position" bigint NOT NULL,
    outcome text NOT NULL COLLATE pg_catalog."C",
    CONSTRAINT evaluation_is_never_consumed CHECK ((mode = 'train'::text)),
    CONSTRAINT outcome_is_known CHECK ((outcome = ANY (ARRAY['trained'::text, 'zero_variance'::text, 'stale'::text, 'surplus'::text, 'invalid'::text])))
);

CREATE TABLE public.meta (
    key text NOT NULL COLLATE pg_catalog."C",
    value bytea NOT NULL
);

CREATE TABLE public.metrics (
    seq bigint NOT NULL,
    run_id text NOT NULL COLLATE pg_catalog."C",
    step bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    value double precision,
    created_ns bigint NOT NULL,
    abandoned boolean NOT NULL
);

CREATE SEQUENCE public.metrics_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.metrics_seq_seq OWNED BY public.metrics.seq;

CREATE TABLE public.resource_versions (
    run_id text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    last bigint NOT NULL
);

CREATE TABLE public.resources (
    run_id text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    version bigint NOT NULL,
    kind text NOT NULL COLLATE pg_catalog."C",
    value text NOT NULL COLLATE pg_catalog."C",
    parent bigint,
    step bigint NOT NULL,
    created_ns bigint NOT NULL
);

CREATE TABLE public.rewards (
    seq bigint NOT NULL,
    id text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    rollout_id text NOT NULL COLLATE pg_catalog."C",
    attempt bigint NOT NULL,
    value double precision NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    call_id text COLLATE pg_catalog."C",
    source text NOT NULL COLLATE pg_catalog."C",
    created_ns bigint NOT NULL,
    CONSTRAINT source_is_known CHECK ((source = ANY (ARRAY['return'::text, 'function'::text, 'output'::text, 'emitted'::text, 'posted'::text, 'air'::text, 'rescored'::text])))
);

CREATE SEQUENCE public.rewards_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.rewards_seq_seq OWNED BY public.rewards.seq;

CREATE TABLE public.rollouts (
    id text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    task text NOT NULL COLLATE pg_catalog."C",
    group_id text NOT NULL COLLATE pg_catalog."C",
    replica bigint NOT NULL,
    mode text NOT NULL COLLATE pg_catalog."C",
    step bigint NOT NULL,
    sampling text NOT NULL COLLATE pg_catalog."C",
    retry text NOT NULL COLLATE pg_catalog."C",
    priority bigint NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C",
    attempt bigint NOT NULL,
    lost bigint NOT NULL,
    created_ns bigint NOT NULL,
    started_ns bigint,
    finished_ns bigint,
    finished_seq bigint,
    reward double precision,
    calls bigint DEFAULT '0'::bigint NOT NULL,
    error text COLLATE pg_catalog."C",
    warning text COLLATE pg_catalog."C",
    CONSTRAINT finished_has_its_place CHECK (((finished_seq IS NOT NULL) = (state = ANY (ARRAY['succeeded'::text, 'failed'::text, 'cancelled'::text])))),
    CONSTRAINT mode_is_known CHECK ((mode = ANY (ARRAY['train'::text, 'eval'::text]))),
    CONSTRAINT state_is_known CHECK ((state = ANY (ARRAY['queued'::text, 'running'::text, 'succeeded'::text, 'failed'::text, 'cancelled'::text])))
);

CREATE TABLE public.runs (
    id text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    state text NOT NULL COLLATE pg_catalog."C",
    config text NOT NULL COLLATE pg_catalog."C",
    created_ns bigint NOT NULL,
    updated_ns bigint NOT NULL,
    summary text NOT NULL COLLATE pg_catalog."C",
    finished bigint DEFAULT '0'::bigint NOT NULL,
    CONSTRAINT state_is_known CHECK ((state = ANY (ARRAY['running'::text, 'finished'::text, 'interrupted'::text, 'failed'::text])))
);

CREATE TABLE public.spans (
    id text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    rollout_id text NOT NULL COLLATE pg_catalog."C",
    attempt bigint NOT NULL,
    name text NOT NULL COLLATE pg_catalog."C",
    parent_id text COLLATE pg_catalog."C",
    attributes text NOT NULL COLLATE pg_catalog."C",
    started_ns bigint NOT NULL,
    finished_ns bigint NOT NULL,
    trace_id text COLLATE pg_catalog."C",
    kind text DEFAULT 'internal'::text NOT NULL COLLATE pg_catalog."C",
    status text DEFAULT 'unset'::text NOT NULL COLLATE pg_catalog."C",
    status_message text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    events text DEFAULT '[]'::text NOT NULL COLLATE pg_catalog."C"
);

CREATE TABLE public.steps (
    id bigint NOT NULL,
    run_id text NOT NULL COLLATE pg_catalog."C",
    step bigint NOT NULL,
    state text NOT NULL COLLATE pg_catalog."C",
    version bigint,
    created_ns bigint NOT NULL,
    CONSTRAINT closed_has_a_version CHECK (((state <> 'closed'::text) OR (version IS NOT NULL))),
    CONSTRAINT state_is_known CHECK ((state = ANY (ARRAY['open'::text, 'closed'::text, 'abandoned'::text])))
);

CREATE SEQUENCE public.steps_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1;

ALTER SEQUENCE public.steps_id_seq OWNED BY public.steps.id;

CREATE TABLE public.workers (
    id text NOT NULL COLLATE pg_catalog."C",
    run_id text NOT NULL COLLATE pg_catalog."C",
    host text NOT NULL COLLATE pg_catalog."C",
    pid bigint NOT NULL,
    running bigint NOT NULL,
    seen_ns bigint NOT NULL
);

CREATE TABLE public.writers (
    id text NOT NULL COLLATE pg_catalog."C",
    last bigint NOT NULL,
    seen_ns bigint NOT NULL
);

ALTER TABLE ONLY public.metrics ALTER COLUMN seq SET DEFAULT nextval('public.metrics_seq_seq'::regclass);

ALTER TABLE ONLY public.rewards ALTER COLUMN seq SET DEFAULT nextval('public.rewards_seq_seq'::regclass);

ALTER TABLE ONLY public.steps ALTER COLUMN id SET DEFAULT nextval('public.steps_id_seq'::regclass);

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT attempts_pkey PRIMARY KEY (rollout_id, attempt);

ALTER TABLE ONLY public.calls
    ADD CONSTRAINT calls_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT checkpoints_pkey PRIMARY KEY (run_id, step);

ALTER TABLE ONLY public.consumption
    ADD CONSTRAINT consumption_pkey PRIMARY KEY (rollout_id);

ALTER TABLE ONLY public.consumption
    ADD CONSTRAINT consumption_step_id_position_key UNIQUE (step_id, "position");

ALTER TABLE ONLY public.meta
    ADD CONSTRAINT meta_pkey PRIMARY KEY (key);

ALTER TABLE ONLY public.metrics
    ADD CONSTRAINT metrics_pkey PRIMARY KEY (seq);

ALTER TABLE ONLY public.resource_versions
    ADD CONSTRAINT resource_versions_pkey PRIMARY KEY (run_id, name);

ALTER TABLE ONLY public.resources
    ADD CONSTRAINT resources_pkey PRIMARY KEY (run_id, name, version);

ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT rewards_id_key UNIQUE (id);

ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT rewards_pkey PRIMARY KEY (seq);

ALTER TABLE ONLY public.rollouts
    ADD CONSTRAINT rollouts_id_run_id_mode_key UNIQUE (id, run_id, mode);

ALTER TABLE ONLY public.rollouts
    ADD CONSTRAINT rollouts_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.rollouts
    ADD CONSTRAINT rollouts_run_id_finished_seq_key UNIQUE (run_id, finished_seq);

ALTER TABLE ONLY public.rollouts
    ADD CONSTRAINT rollouts_run_id_group_id_replica_key UNIQUE (run_id, group_id, replica);

ALTER TABLE ONLY public.runs
    ADD CONSTRAINT runs_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.spans
    ADD CONSTRAINT spans_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.steps
    ADD CONSTRAINT steps_id_run_id_key UNIQUE (id, run_id);

ALTER TABLE ONLY public.steps
    ADD CONSTRAINT steps_pkey PRIMARY KEY (id);

ALTER TABLE ONLY public.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (run_id, id);

ALTER TABLE ONLY public.writers
    ADD CONSTRAINT writers_pkey PRIMARY KEY (id);

CREATE INDEX attempts_by_lease ON public.attempts USING btree (lease_expires_ns) WHERE (state = 'running'::text);

CREATE UNIQUE INDEX attempts_one_running ON public.attempts USING btree (rollout_id) WHERE (state = 'running'::text);

CREATE INDEX calls_by_attempt ON public.calls USING btree (rollout_id, attempt);

CREATE INDEX calls_by_parent ON public.calls USING btree (parent_id) WHERE (parent_id IS NOT NULL);

CREATE INDEX metrics_by_name ON public.metrics USING btree (run_id, step, name);

CREATE INDEX metrics_by_seq ON public.metrics USING btree (run_id, seq);

CREATE INDEX rewards_by_call ON public.rewards USING btree (call_id) WHERE (call_id IS NOT NULL);

CREATE INDEX rewards_by_rollout ON public.rewards USING btree (rollout_id, attempt);

CREATE INDEX rollouts_by_state ON public.rollouts USING btree (run_id, state, priority DESC, id, mode);

CREATE INDEX spans_broken ON public.spans USING btree (rollout_id) WHERE (name = 'gateway.broken_spans'::text);

CREATE INDEX spans_by_rollout ON public.spans USING btree (rollout_id, started_ns);

CREATE UNIQUE INDEX steps_one_a_number ON public.steps USING btree (run_id, step) WHERE (state <> 'abandoned'::text);

ALTER TABLE ONLY public.attempts
    ADD CONSTRAINT attempts_rollout_id_fkey FOREIGN KEY (rollout_id) REFERENCES public.rollouts(id);

ALTER TABLE ONLY public.calls
    ADD CONSTRAINT calls_parent_id_fkey FOREIGN KEY (parent_id) REFERENCES public.calls(id);

ALTER TABLE ONLY public.calls
    ADD CONSTRAINT calls_rollout_id_attempt_fkey FOREIGN KEY (rollout_id, attempt) REFERENCES public.attempts(rollout_id, attempt);

ALTER TABLE ONLY public.checkpoints
    ADD CONSTRAINT checkpoints_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.runs(id);

ALTER TABLE ONLY public.consumption
    ADD CONSTRAINT consumption_rollout_id_run_id_mode_fkey FOREIGN KEY (rollout_id, run_id, mode) REFERENCES public.rollouts(id, run_id, mode);

ALTER TABLE ONLY public.consumption
    ADD CONSTRAINT consumption_step_id_run_id_fkey FOREIGN KEY (step_id, run_id) REFERENCES public.steps(id, run_id);

ALTER TABLE ONLY public.metrics
    ADD CONSTRAINT metrics_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.runs(id);

ALTER TABLE ONLY public.resource_versions
    ADD CONSTRAINT resource_versions_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.runs(id);

ALTER TABLE ONLY public.resources
    ADD CONSTRAINT resources_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.runs(id);

ALTER TABLE ONLY public.resources
    ADD CONSTRAINT resources_run_id_name_fkey FOREIGN KEY (run_id, name) REFERENCES public.resource_versions(run_id, name);

ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT rewards_call_id_fkey FOREIGN KEY (call_id) REFERENCES public.calls(id);

ALTER TABLE ONLY public.rewards
    ADD CONSTRAINT rewards_rollout_id_attempt_fkey FOREIGN KEY (rollout_id, attempt) REFERENCES public.attempts(rollout_id, attempt);

ALTER TABLE ONLY public.rollouts
    ADD CONSTRAINT rollouts_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.runs(id);

ALTER TABLE ONLY public.spans
    ADD CONSTRAINT spans_rollout_id_attempt_fkey FOREIGN KEY (rollout_id, attempt) REFERENCES public.attempts(rollout_id, attempt);

ALTER TABLE ONLY public.steps
    ADD CONSTRAINT steps_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.runs(id);

ALTER TABLE ONLY public.workers
    ADD CONSTRAINT workers_run_id_fkey FOREIGN KEY (run_id) REFERENCES public.runs(id);

