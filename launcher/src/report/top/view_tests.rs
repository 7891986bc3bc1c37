//! Tests of the view of `launch top` at several sizes.
use super::*;
use crate::report::top::top_state::KeyAction;
use dashboard::{RankState, RunInfo, SnapshotHost};
use protocol::{
    control::{GpuUsage, HostUsage, WorkerUsage},
    event::{StragglerReport, StragglerState},
    run_measurements::{HostUsageSample, RunMeasurements},
    step_times::{RankTimes, StepTimes},
    straggler::StragglerKind,
};
use ratatui::{
    Terminal,
    backend::TestBackend,
    crossterm::event::{KeyCode, KeyEvent, KeyModifiers},
};
use serde_json::json;

fn host_status(host: u32) -> HostUsageSample {
    let gpu = GpuUsage { busy_share: Some(0.9), ..GpuUsage::default() };
    let worker = |rank| WorkerUsage { rank, rss: 3 << 30, cpu_us: 3_800_000, ..WorkerUsage::default() };
    let usage = HostUsage {
        interval_ms: 2000,
        cpus: 8,
        cpu_share: 0.5,
        memory_total: 64 << 30,
        memory_used: 16 << 30,
        network_sent: 4 << 20,
        gpus: vec![gpu],
        workers: (4 * host..4 * host + 4).map(worker).collect(),
        ..HostUsage::default()
    };
    HostUsageSample { host: format!("node-{host}"), time: 1.0, usage }
}

/// A run of a training on `hosts` hosts with four ranks each, of which rank 5 is slow.
fn example_run(hosts: u32) -> RunSnapshot {
    let world = 4 * hosts;
    let slow = StragglerReport {
        state: StragglerState::Slow,
        rank: 5,
        host: "node-1".into(),
        kind: StragglerKind::Work,
        step: Some(40),
        share: 0.2,
        step_s: Some(0.5),
        reason: None,
        message: "rank 5 (node-1) slows down all ranks: it costs 20 % of the step time of 0.50 s".into(),
    };
    let times = |rank| RankTimes {
        step_us: 500_000,
        waiting_us: if rank == 5 { 20_000 } else { 120_000 },
        ..RankTimes::default()
    };
    RunSnapshot {
        info: RunInfo {
            run: "20261127-050000-abcd".into(),
            name: "train".into(),
            state: "running",
            is_active: true,
            is_named: true,
            world,
            began_ms: 0,
            host: "node-0".into(),
            step: Some(40),
            run_dir: "/runs/r".into(),
        },
        step: Some(40),
        total_steps: Some(200),
        loss: Some(3.25),
        eval_loss: Some(3.5),
        tokens_per_s: Some(12_345.0),
        step_s: Some(0.5),
        peak_rss: Some(3 << 30),
        attempt: 1,
        restarts: 1,
        checkpoints: 2,
        exit_code: None,
        world,
        hosts: (0..hosts)
            .map(|host| SnapshotHost { host: format!("node-{host}"), first_rank: 4 * host, workers: 4 })
            .collect(),
        states: vec![RankState::Running; world as usize],
        status: Some(RunMeasurements {
            hosts: (0..hosts).map(host_status).collect(),
            step_times: StepTimes { step: 40, steps: 1, ranks: (0..world).map(times).collect() },
            stragglers: vec![slow],
            ..RunMeasurements::default()
        }),
        events: (1..=9)
            .map(|step| json!({"event": "notice", "rank": null, "message": format!("message {step}"), "time": 1.0}))
            .collect(),
        losses: (0..300).map(|step| (step, 3.0 + 100.0 / (step + 20) as f64)).collect(),
    }
}

fn example_state(hosts: u32) -> TopState {
    let mut state = TopState::default();
    state.set_run(example_run(hosts));
    state.log = (0..30).map(|n| format!("line {n}")).collect();
    state
}

/// Draws a state on a screen of this size, and returns the text of the screen.
fn render(state: &TopState, width: u16, height: u16) -> String {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).expect("a terminal");
    terminal.draw(|frame| draw_screen(frame, state)).expect("drawn");
    let buffer = terminal.backend().buffer();
    let row = |y: u16| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>();
    (0..height).map(|y| row(y).trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn press(state: &mut TopState, code: KeyCode) -> KeyAction {
    state.handle_key(KeyEvent::new(code, KeyModifiers::NONE))
}

#[test]
fn a_small_screen() {
    insta::assert_snapshot!(render(&example_state(3), 80, 24));
}

#[test]
fn a_large_screen() {
    insta::assert_snapshot!(render(&example_state(3), 200, 60));
}

#[test]
fn keys_select_ranks_and_search() {
    let mut state = example_state(3);
    for (code, selected) in [
        (KeyCode::Left, 0),
        (KeyCode::Right, 1),
        (KeyCode::Down, 5),
        (KeyCode::Down, 9),
        (KeyCode::Down, 9),
        (KeyCode::Up, 5),
    ] {
        assert_eq!((press(&mut state, code), state.selected), (KeyAction::Redraw, selected), "{code:?}");
    }
    assert!(render(&state, 80, 24).contains("rank 5: running, step 0.5 s: work 0.5 s"));
    press(&mut state, KeyCode::Char('/'));
    "LINE 7q".chars().for_each(|c| _ = press(&mut state, KeyCode::Char(c)));
    press(&mut state, KeyCode::Backspace);
    assert!(render(&state, 80, 24).contains("/LINE 7"));
    press(&mut state, KeyCode::Enter);
    state.log = (0..30).map(|n| format!("line {n}")).collect();
    let screen = render(&state, 80, 24);
    assert!(
        screen.contains("line 7") && !screen.contains("line 29") && !screen.contains("message"),
        "{screen}"
    );
    press(&mut state, KeyCode::Esc);
    assert!(render(&state, 80, 24).contains("line 29"));
    assert_eq!(press(&mut state, KeyCode::Char('q')), KeyAction::Quit);
    let interrupt = KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL);
    assert_eq!(state.handle_key(interrupt), KeyAction::Quit);
}

#[test]
fn texts_of_runs_do_not_control_the_terminal() {
    let mut state = example_state(3);
    let text = "\u{1b}]0;title\u{7}\u{1b}[2J\u{202e}x".to_owned();
    state.log.push(text.clone());
    let mut run = example_run(3);
    run.info.name.clone_from(&text);
    run.hosts[0].host.clone_from(&text);
    run.events.push(json!({"event": "notice", "rank": null, "message": text, "time": 1.0}));
    run.events.push(json!({"event": "\u{1b}[2J", "time": 1.0}));
    run.status.iter_mut().for_each(|status| status.stragglers[0].message.clone_from(&text));
    state.set_run(run);
    for (width, height) in [(80, 24), (200, 60)] {
        let screen = render(&state, width, height);
        let unprintable =
            screen.chars().filter(|c| *c != '\n' && diagnostic::terminal_text::is_unprintable(*c));
        assert_eq!(unprintable.count(), 0, "{screen:?}");
    }
}

#[test]
fn every_size_and_many_ranks_are_drawn() {
    for hosts in [0, 1, 300] {
        let mut state = example_state(hosts);
        (0..50).for_each(|_| _ = press(&mut state, KeyCode::Down));
        for (width, height) in [(1, 1), (10, 3), (40, 10), (80, 24), (121, 39), (500, 200)] {
            render(&state, width, height);
        }
        assert_eq!(state.selected, if hosts == 300 { 200 } else { 0 });
    }
    render(&TopState::default(), 80, 24);
}
