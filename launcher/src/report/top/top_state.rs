//! Defines [`TopState`], which stores what `launch top` shows, such as the selected rank, and
//! changes it when a key is pressed.
use dashboard::RunSnapshot;
use diagnostic::terminal_text::filter_line;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// The longest text that the user of `launch top` can search for, in characters.
const MAX_SEARCH_CHARS: usize = 100;

/// The state of the view of `launch top`: the shown run, the selected rank and the search text.
#[derive(Debug, Default)]
pub(super) struct TopState {
    /// The state of the run; `None` before it was read.
    pub(super) run: Option<RunSnapshot>,
    /// The rank whose log is shown.
    pub(super) selected: u32,
    /// The end of the log of the selected rank.
    pub(super) log: Vec<String>,
    /// Only events and lines of logs that contain this text are shown.
    pub(super) filter: String,
    /// The text that the user is typing; `None` if the user does not type.
    pub(super) input: Option<String>,
}

/// The action that a pressed key requests from the event loop of `launch top`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyAction {
    /// Draw the screen again.
    Redraw,
    /// End the program.
    Quit,
}

impl TopState {
    /// Changes the view for a pressed key, for example selects another rank, and returns what the
    /// caller must do, such as redraw or quit.
    pub(super) fn handle_key(&mut self, key: KeyEvent) -> KeyAction {
        if key.kind == KeyEventKind::Release {
            return KeyAction::Redraw;
        }
        let is_interrupt = key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL);
        if is_interrupt {
            return KeyAction::Quit;
        }
        if let Some(input) = &mut self.input {
            match key.code {
                KeyCode::Esc => self.input = None,
                KeyCode::Enter => self.filter = self.input.take().unwrap_or_default(),
                KeyCode::Backspace => _ = input.pop(),
                KeyCode::Char(c) if input.chars().count() < MAX_SEARCH_CHARS => input.push(c),
                _ => {}
            }
            return KeyAction::Redraw;
        }
        match key.code {
            KeyCode::Char('q') => return KeyAction::Quit,
            KeyCode::Char('/') => self.input = Some(String::new()),
            KeyCode::Esc => self.filter.clear(),
            KeyCode::Left => self.select_rank(self.selected.saturating_sub(1)),
            KeyCode::Right => self.select_rank(self.selected.saturating_add(1)),
            KeyCode::Up => self.select_neighbouring_host(-1),
            KeyCode::Down => self.select_neighbouring_host(1),
            _ => {}
        }
        KeyAction::Redraw
    }

    /// Replaces the run data that `launch top` shows by newer data of this run.
    pub(super) fn set_run(&mut self, run: RunSnapshot) {
        self.run = Some(run);
        self.select_rank(self.selected);
    }

    /// Selects the rank `rank`, or the last rank if the run has no such rank.
    fn select_rank(&mut self, rank: u32) {
        let ranks = self.run.as_ref().map_or(0, |run| run.states.len() as u32);
        let rank = rank.min(ranks.saturating_sub(1));
        if rank != self.selected {
            self.log.clear();
        }
        self.selected = rank;
    }

    /// Selects a rank on another host, which is listed `by` lines below the host of the selected
    /// rank, or above it for a negative `by`.
    fn select_neighbouring_host(&mut self, by: isize) {
        let Some(run) = &self.run else { return };
        let has_rank =
            |first: u32, workers: u32| (first..first.saturating_add(workers)).contains(&self.selected);
        let Some(at) = run.hosts.iter().position(|host| has_rank(host.first_rank, host.workers)) else {
            return;
        };
        let position = self.selected - run.hosts[at].first_rank;
        let Some(host) = at.checked_add_signed(by).and_then(|at| run.hosts.get(at)) else { return };
        self.select_rank(host.first_rank + position.min(host.workers.saturating_sub(1)));
    }

    /// Returns whether an output line contains the text that the user searches for, without regard
    /// to case.
    pub(super) fn matches_search(&self, line: &str) -> bool {
        self.filter.is_empty() || line.to_lowercase().contains(&self.filter.to_lowercase())
    }

    /// Lists the messages about slow ranks of the shown run.
    pub(super) fn list_straggler_messages(&self) -> Vec<String> {
        let status = self.run.as_ref().and_then(|run| run.status.as_ref());
        status.map_or_else(Vec::new, |status| {
            status.stragglers.iter().map(|r| filter_line(&r.message)).collect()
        })
    }
}
