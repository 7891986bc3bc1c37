//! `run.signals`: the actions of launch on signals. `run.stop_signal`: the signal that asks a
//! program to save and stop.
use crate::{
    keys::{
        choice::{choice_type, choices},
        value_type::{ReadResult, ValueType, wrong_type_error},
    },
    yaml::{
        format::format_map,
        tree::{YamlNode, YamlValue, make_excerpt},
        value_error::ValueError,
    },
};
use diagnostic::codes::job as codes;
use serde::{Deserialize, Serialize};
use serde_json::json;

/// `run.signals`: the action for each signal that launch receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSignalActions {
    /// The action when launch receives SIGUSR1.
    pub usr1: SignalAction,
    /// The action when launch receives SIGUSR2.
    pub usr2: SignalAction,
    /// The action when launch receives SIGTERM.
    pub term: SignalAction,
}

choices! {
    /// What launch does when it receives a signal.
    #[serde(rename_all = "snake_case")]
    pub enum SignalAction {
        /// The built-in training saves a checkpoint and continues. A program that handles the
        /// signal gets it.
        Save = "save",
        /// The built-in training saves a checkpoint and stops. A program gets
        /// `run.stop_signal`.
        SaveAndStop = "save_and_stop",
        /// The signal has no effect.
        Ignore = "ignore",
    }
}

choices! {
    /// `run.stop_signal`: the signal that asks a program to save and stop.
    #[derive(Default)]
    pub enum StopSignal {
        /// The signal that every program gets before SIGKILL.
        Term = "SIGTERM" is default,
        /// The signal of Ctrl-C. Python raises `KeyboardInterrupt`.
        Int = "SIGINT",
        /// The signal of a closed terminal.
        Hup = "SIGHUP",
        /// A signal whose meaning the program defines, such as a save.
        Usr1 = "SIGUSR1",
        /// A signal whose meaning the program defines, such as a save.
        Usr2 = "SIGUSR2",
    }
}

/// Returns the parser and printer ([`ValueType`]) for `run.signals`: a mapping of signals to
/// actions.
pub(crate) fn signals_type() -> ValueType<RunSignalActions> {
    let action = choice_type::<SignalAction>().schema;
    let schema = json!({
        "type": "object",
        "properties": {"SIGUSR1": action, "SIGUSR2": action, "SIGTERM": action},
        "additionalProperties": false,
    });
    let accepts = "mapping of SIGUSR1, SIGUSR2, SIGTERM to `save`, `save_and_stop` or `ignore`";
    ValueType::new_single_line(accepts, schema, read_signals, |RunSignalActions { usr1, usr2, term }| {
        let actions = [("SIGUSR1", usr1), ("SIGUSR2", usr2), ("SIGTERM", term)];
        format_map(actions.map(|(name, action)| (name.to_owned(), action.name().to_owned())))
    })
}

/// Reads `run.signals`, a mapping of signals to actions. Signals that the mapping does not name
/// keep their default actions.
fn read_signals(node: &YamlNode) -> ReadResult<RunSignalActions> {
    let YamlValue::Map(entries) = &node.value else {
        return Err(wrong_type_error("a mapping of signals to actions", node));
    };
    let mut signals = RunSignalActions {
        usr1: SignalAction::Save,
        usr2: SignalAction::Ignore,
        term: SignalAction::SaveAndStop,
    };
    for entry in entries {
        let action = match entry.key.as_str() {
            "SIGUSR1" => &mut signals.usr1,
            "SIGUSR2" => &mut signals.usr2,
            "SIGTERM" => &mut signals.term,
            other => {
                let message = format!("has an action for `{}`, which is not supported", make_excerpt(other));
                return Err(ValueError::new(codes::JOB_VALUE_UNKNOWN, entry.key_span, message)
                    .with_help("use SIGUSR1, SIGUSR2 or SIGTERM"));
            }
        };
        *action = choice_type().read(&entry.value).map_err(|error| error.with_part(&entry.key))?;
    }
    Ok(signals)
}
