//! Tests the JSON form of events in both schemas, and checks that docs/events.md documents it.
use diagnostic::{Diagnostic, Location, codes};
use jobspec::ReloadValues;
use protocol::{
    event::{
        Event, EventSchema, FailureReport, ResumeSource, StepTimesReport, StragglerReason, StragglerReport,
        StragglerState, TimeStatistics, TimedEvent,
    },
    failure::{FailureReason, GpuFault},
    hang::{HangKind, HangVerdict},
    straggler::StragglerKind,
};
use serde_json::{Map, Value};
use std::{collections::BTreeSet, fs, path::Path};

/// Returns the verdict on a hang in which the collective is unknown.
fn make_verdict() -> Box<HangVerdict> {
    Box::new(HangVerdict {
        kind: HangKind::Unknown,
        collective: None,
        entered: Vec::new(),
        not_entered: Vec::new(),
        undetermined: Vec::new(),
        calls: Vec::new(),
        gpu_faults: Vec::new(),
        nccl_warnings: Vec::new(),
        collective_timeouts: Vec::new(),
    })
}

/// Returns a failure report in which every field has a value.
fn example_failure() -> Box<FailureReport> {
    let detail = Diagnostic::error(codes::run::INTERNAL, "a detail");
    let diagnostic = Diagnostic::error(codes::run::PLAN_INVALID, "the job does not fit the hosts")
        .with_subject("cluster.use_hosts")
        .with_location(Location::File { file: "job.yaml".into() })
        .with_field("hosts", 3)
        .with_help("use fewer hosts")
        .with_detail_diagnostic(detail);
    Box::new(FailureReport {
        rank: Some(1),
        host: "node-3".into(),
        pid: 4711,
        reason: FailureReason::Exit { code: 3, error: None },
        message: "exited with code 3".into(),
        help: vec!["read the log".into()],
        diagnostics: vec![diagnostic],
        log: Some("/run/rank-1.log".into()),
        tail: vec!["last line".into()],
    })
}

/// Returns the event that follows `event` in the list of examples; `None` after the last one. The
/// match is exhaustive, so a new variant of [`Event`] does not compile without an example.
fn next_event(event: Option<&Event>) -> Option<Event> {
    let path = || "/run".into();
    Some(match event {
        None => Event::Start { run: "r1".into(), run_dir: path(), world: 8 },
        Some(Event::Start { .. }) => {
            Event::Placement { attempt: 1, world: 8, hosts: vec!["h0".into()], workers: vec![8] }
        }
        Some(Event::Placement { .. }) => {
            Event::Ready { step: 0, total_steps: 10, parameters: 5, tokens_per_step: 7 }
        }
        Some(Event::Ready { .. }) => Event::Resume {
            step: 4,
            path: path(),
            world: Some(4),
            stage: None,
            source: ResumeSource::Memory,
            reason: Some("no copy of rank 3".into()),
        },
        Some(Event::Resume { .. }) => Event::Step {
            step: 5,
            loss: 0.1 + 0.2,
            grad_norm: 1.0 / 3.0,
            lr: 3e-4,
            tokens: 9,
            tokens_per_s: 2.5,
            peak_rss: 1 << 40,
            exposed_comm_s: 0.125,
        },
        Some(Event::Step { .. }) => Event::Overflow { step: 6, loss: 2.0, loss_scale: 1024.0, skipped: 1 },
        Some(Event::Overflow { .. }) => {
            let range = TimeStatistics { min: 0.1, median: 0.2, max: 0.3 };
            Event::StepTimes(StepTimesReport {
                step: 6,
                steps: 2,
                step_s: 0.5,
                work_s: range,
                waiting_s: range,
                collective_s: range,
                slowest_rank: 2,
            })
        }
        Some(Event::StepTimes(_)) => Event::Straggler(Box::new(StragglerReport {
            state: StragglerState::Slow,
            rank: 2,
            host: "node-3".into(),
            kind: StragglerKind::Work,
            step: Some(6),
            share: 0.25,
            step_s: Some(0.5),
            reason: Some(StragglerReason::CpuQuota { share: 0.3 }),
            message: "rank 2 is slow".into(),
        })),
        Some(Event::Straggler(_)) => Event::Eval { step: 6, loss: 2.0, perplexity: 7.4, tokens: 3 },
        Some(Event::Eval { .. }) => Event::Sample { step: 6, prompt: "a".into(), text: "b".into() },
        Some(Event::Sample { .. }) => Event::Checkpoint { step: 6, path: path(), bytes: 7, seconds: 0.5 },
        Some(Event::Checkpoint { .. }) => Event::Gather { step: 6, path: path(), bytes: 7 },
        Some(Event::Gather { .. }) => Event::Reload { step: 6, values: reload_values() },
        Some(Event::Reload { .. }) => Event::Takeover { host: "login1".into(), pid: 77, unattended_s: 12.5 },
        Some(Event::Takeover { .. }) => {
            Event::new_diagnostic_notice(None, "line\nbreak", &example_failure().diagnostics[0])
        }
        Some(Event::Notice { .. }) => {
            Event::Restart { attempt: 1, restarts_left: 2, pause_s: 1.5, failure: example_failure() }
        }
        Some(Event::Restart { .. }) => Event::Failure(example_failure()),
        Some(Event::Failure(_)) => Event::Done { exit_code: 1, step: Some(6), seconds: 8.0 },
        Some(Event::Done { .. }) => return None,
    })
}

/// Returns new values of all reloadable keys, for examples of events.
fn reload_values() -> ReloadValues {
    let source = jobspec::JobSource::Text {
        name: "job.yaml".into(),
        text: "train: {data: {files: [a]}, steps: 10}".into(),
    };
    ReloadValues::from_job(&jobspec::load_job(source, &[]).expect("a job").0)
}

/// Returns an example of every event.
fn list_events() -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    while let Some(event) = next_event(events.last()) {
        events.push(event);
    }
    events
}

/// Returns the reason that follows `reason` in the list of examples; `None` after the last one. The
/// match is exhaustive, so a new variant of [`FailureReason`] does not compile without an example.
fn next_reason(reason: Option<&FailureReason>) -> Option<FailureReason> {
    use FailureReason as R;
    let code = codes::run::INTERNAL;
    let text = || String::from("text");
    Some(match reason {
        None => R::Exit { code: 3, error: Some(text()) },
        Some(R::Exit { .. }) => R::Signal { name: "SIGSEGV".into(), number: 11, core_dumped: true },
        Some(R::Signal { .. }) => R::Oom { limit_bytes: Some(1 << 30) },
        Some(R::Oom { .. }) => {
            R::Gpu(GpuFault { xid: 79, pci_address: "0000:17:00".into(), description: Some(text()) })
        }
        Some(R::Gpu(_)) => R::Panic,
        Some(R::Panic) => R::WorkerError { code },
        Some(R::WorkerError { .. }) => R::StoppedUnexpectedly,
        Some(R::StoppedUnexpectedly) => R::AbortedByPeer,
        Some(R::AbortedByPeer) => R::Hang { seconds: 60, ranks: vec![0, 1], verdict: Some(make_verdict()) },
        Some(R::Hang { .. }) => R::Suspended { seconds: 60, verdict: Some(make_verdict()) },
        Some(R::Suspended { .. }) => R::CollectiveTimeout { verdict: Some(make_verdict()) },
        Some(R::CollectiveTimeout { .. }) => R::WorkerSilent { seconds: 30 },
        Some(R::WorkerSilent { .. }) => R::WorkerLost,
        Some(R::WorkerLost) => R::StartFailed { code },
        Some(R::StartFailed { .. }) => R::AgentLost,
        Some(R::AgentLost) => R::AgentSilent { seconds: 30 },
        Some(R::AgentSilent { .. }) => R::AgentFailed { code },
        Some(R::AgentFailed { .. }) => R::ControllerSilent { seconds: 60 },
        Some(R::ControllerSilent { .. }) => R::HostLost { host: "h1".into(), silent_s: None },
        Some(R::HostLost { .. }) => R::TooFewHosts { available: 1, required: 2 },
        Some(R::TooFewHosts { .. }) => R::Rejected { code },
        Some(R::Rejected { .. }) => R::ControllerFailed { code },
        Some(R::ControllerFailed { .. }) => R::Unknown,
        Some(R::Unknown) => return None,
    })
}

/// Returns an example of every failure reason.
fn list_reasons() -> Vec<FailureReason> {
    let mut reasons: Vec<FailureReason> = Vec::new();
    while let Some(reason) = next_reason(reasons.last()) {
        reasons.push(reason);
    }
    reasons
}

/// Formats the examples of all events as JSON in a schema, one per line.
fn format_lines(schema: EventSchema) -> String {
    list_events().iter().map(|event| event.to_json(schema).expect("JSON") + "\n").collect()
}

#[test]
fn schema_2_has_the_new_and_the_deprecated_names() {
    insta::assert_snapshot!(format_lines(EventSchema::V2));
}

#[test]
fn schema_1_has_the_names_of_earlier_releases_only() {
    insta::assert_snapshot!(format_lines(EventSchema::V1));
}

#[test]
fn failure_reasons_are_objects_tagged_by_kind() {
    let lines = list_reasons()
        .iter()
        .map(|reason| serde_json::to_string(reason).expect("JSON") + "\n")
        .collect::<String>();
    insta::assert_snapshot!(lines);
    for reason in list_reasons() {
        let text = serde_json::to_string(&reason).expect("JSON");
        assert_eq!(serde_json::from_str::<FailureReason>(&text).expect("a reason"), reason);
    }
}

#[test]
fn events_round_trip_in_schema_2() {
    for event in list_events() {
        let timed = TimedEvent { event, time: 1_700_000_000.25 };
        let line = timed.to_json(EventSchema::V2).expect("JSON");
        assert_eq!(TimedEvent::from_json(&line).expect("an event"), timed, "{line}");
    }
}

#[test]
fn journals_of_earlier_releases_are_read() {
    for event in list_events() {
        let line = event.to_json(EventSchema::V1).expect("JSON");
        let read = Event::from_json(&line).expect("an event");
        assert_eq!(read.to_json(EventSchema::V1).expect("JSON"), line);
        let without_reason = FailureReport {
            reason: FailureReason::Unknown,
            help: Vec::new(),
            diagnostics: Vec::new(),
            ..*example_failure()
        };
        match (&event, &read) {
            (Event::Failure(_), Event::Failure(failure)) => assert_eq!(**failure, without_reason),
            (Event::Restart { .. }, Event::Restart { failure, attempt: 1, restarts_left: 2, .. }) => {
                assert_eq!(**failure, without_reason);
            }
            (Event::Notice { rank, message, .. }, _) => {
                assert_eq!(read, Event::new_notice(*rank, message.as_str()));
            }
            (
                Event::Placement { hosts, .. },
                Event::Placement { hosts: read, workers, attempt: 1, world: 8 },
            ) => {
                assert_eq!((read, workers.as_slice()), (hosts, [].as_slice()));
            }
            _ => assert_eq!(read, event),
        }
    }
}

#[test]
fn a_reason_of_a_later_version_is_unknown() {
    let reason: FailureReason =
        serde_json::from_str(r#"{"kind":"solar_flare","w_per_m2":1361}"#).expect("read");
    assert_eq!(reason, FailureReason::Unknown);
}

// ---- documentation ----

/// Reads docs/events.md.
fn read_documentation() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/events.md");
    fs::read_to_string(path).expect("docs/events.md")
}

/// Returns the text of the section `title` of a page. Panics if there is no such section.
fn find_section<'a>(page: &'a str, title: &str) -> &'a str {
    let heading = format!("\n## {title}\n");
    let start = page.find(&heading).unwrap_or_else(|| panic!("docs/events.md has no section `{title}`"));
    let rest = &page[start + heading.len()..];
    &rest[..rest.find("\n## ").unwrap_or(rest.len())]
}

/// Reads one column of the tables of a section. Considers only the rows whose first cells are
/// `leading`, and returns the next cell of each row, without backticks.
fn read_table_column(section: &str, leading: &[&str]) -> BTreeSet<String> {
    let cell = |cell: &str| cell.trim().trim_matches('`').to_owned();
    let rows = section.lines().filter(|line| line.starts_with("| `"));
    let rows = rows.map(|line| line.trim_matches('|').split('|').map(cell).collect::<Vec<_>>());
    rows.filter(|row| row.iter().zip(leading).all(|(a, b)| a == b))
        .filter_map(|row| row.get(leading.len()).cloned())
        .collect()
}

/// Returns the names of the fields of a JSON object, except the names in `except`.
fn collect_field_names(object: &Map<String, Value>, except: &[&str]) -> BTreeSet<String> {
    object.keys().filter(|name| !except.contains(&name.as_str())).cloned().collect()
}

#[test]
fn every_event_and_field_is_documented() {
    let page = read_documentation();
    let deprecated = ["cause", "epoch", "left"];
    let common = read_table_column(find_section(&page, "Schema"), &[]);
    assert_eq!(common, ["event", "report", "schema", "time"].map(String::from).into());
    for event in list_events() {
        let line = event.to_json(EventSchema::V2).expect("JSON");
        let object: Map<String, Value> = serde_json::from_str(&line).expect("an object");
        let name = object["event"].as_str().expect("a name").to_owned();
        let mut documented = read_table_column(find_section(&page, &name), &[]);
        if name == "restart" {
            documented.extend(read_table_column(find_section(&page, "failure"), &[]));
        }
        let except = [&deprecated[..], &["event", "schema"]].concat();
        assert_eq!(collect_field_names(&object, &except), documented, "fields of `{name}`");
        let old = read_table_column(find_section(&page, "Deprecated names"), &[]);
        for field in deprecated.iter().filter(|field| object.contains_key(**field)) {
            assert!(old.iter().any(|row| row.contains(name.as_str())), "`{field}` of `{name}`");
        }
    }
}

#[test]
fn every_failure_reason_and_field_is_documented() {
    let page = read_documentation();
    let section = find_section(&page, "Failure reasons");
    let (kinds, fields) = section.split_once("Further fields").expect("two tables");
    let mut documented_kinds = read_table_column(kinds, &[]);
    for reason in list_reasons() {
        let Value::Object(object) = serde_json::to_value(&reason).expect("JSON") else { panic!("an object") };
        let kind = object["kind"].as_str().expect("a kind").to_owned();
        assert!(documented_kinds.remove(&kind), "`{kind}` is not documented");
        let code = read_table_column(kinds, &[&kind]);
        let has_own_code = object.get("code").is_some_and(Value::is_string);
        let expected = if has_own_code { "the code of that error" } else { reason.code().name() };
        assert_eq!(code, [expected.to_owned()].into(), "code of `{kind}`");
        assert_eq!(
            collect_field_names(&object, &["kind"]),
            read_table_column(fields, &[&kind]),
            "fields of `{kind}`"
        );
    }
    assert!(documented_kinds.is_empty(), "documented, but not reasons: {documented_kinds:?}");
}
