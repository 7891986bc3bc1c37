//! Which run is meant.
use super::{Run, State};

/// What a command does with the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wanted {
    /// Reads what it left: the newest where nothing runs.
    Any,
    /// Speaks to it.
    Running,
}

/// The run that is meant by its name, the beginning of its name, its job's name, or by nothing at all. `runs`: the newest
/// first. The error is a line for a person, with the runs that it could be.
pub(crate) fn choose<'r>(
    runs: &'r [Run],
    asked: Option<&str>,
    wanted: Wanted,
) -> Result<&'r Run, (String, Vec<&'r Run>)> {
    let running = |run: &&Run| run.state == State::Running;
    let Some(asked) = asked else {
        let going: Vec<&Run> = runs.iter().filter(running).collect();
        return match (going.as_slice(), runs.first(), wanted) {
            ([one], ..) => Ok(one),
            ([], Some(newest), Wanted::Any) => Ok(newest),
            ([], None, Wanted::Any) => Err(("there are no runs".to_owned(), Vec::new())),
            ([], _, Wanted::Running) => far(runs),
            _ => Err((format!("{} runs go on: which one?", going.len()), going)),
        };
    };
    if let Some(run) = runs.iter().find(|run| run.entry.run == asked) {
        return Ok(run);
    }
    let named: Vec<&Run> = runs.iter().filter(|run| run.entry.name == asked).collect();
    let going: Vec<&Run> = named.iter().copied().filter(running).collect();
    match (going.as_slice(), named.as_slice()) {
        ([one], _) => return Ok(one),
        ([], [newest, ..]) => return Ok(newest),
        ([_, ..], _) => return Err((format!("{} runs of `{asked}` go on: which one?", going.len()), going)),
        _ => {}
    }
    let begun: Vec<&Run> = runs.iter().filter(|run| run.entry.run.starts_with(asked)).collect();
    match begun.as_slice() {
        [one] => Ok(one),
        [] => Err((format!("no run is named `{asked}`, and no job"), Vec::new())),
        _ => Err((format!("`{asked}` begins the names of {} runs: which one?", begun.len()), begun)),
    }
}

/// Nothing runs here. A run that began on another machine is meant where there is one: what is asked of it can be asked there.
fn far(runs: &[Run]) -> Result<&Run, (String, Vec<&Run>)> {
    let far: Vec<&Run> = runs.iter().filter(|run| run.state == State::Elsewhere).collect();
    match far.as_slice() {
        [] => Err(("nothing is running".to_owned(), Vec::new())),
        [one] => Ok(one),
        _ => Err((
            format!("nothing is running here; {} runs began on other machines: which one?", far.len()),
            far,
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Entry, Me};
    use super::*;

    #[test]
    fn the_run_that_is_meant_or_the_list_of_those_it_could_be() {
        let me = Me::find().expect("myself");
        let run = |run: &str, name: &str, state| Run {
            entry: Entry {
                version: 1,
                run: run.into(),
                name: name.into(),
                run_dir: "/".into(),
                world: 1,
                began_ms: 0,
                command: vec![],
                by: me.clone(),
            },
            state,
            step: None,
        };
        let (on, off) = (State::Running, State::Ended(0, 1.0));
        let none: [Run; 0] = [];
        let past = [run("2026-3", "b", off), run("2026-2", "a", State::Lost), run("2025-1", "a", off)];
        let one = [run("2026-3", "b", off), run("2026-2", "a", on), run("2025-1", "a", off)];
        let two = [run("2026-3", "a", on), run("2026-2", "a", on), run("2025-1", "c", off)];
        let away = [
            run("2026-4", "a", State::Elsewhere),
            run("2026-3", "b", off),
            run("2026-2", "c", State::Elsewhere),
        ];
        for (runs, asked, wanted, want) in [
            (&none[..], None, Wanted::Any, Err("there are no runs")),
            (&past, None, Wanted::Any, Ok("2026-3")),
            (&past, None, Wanted::Running, Err("nothing is running")),
            (&away[..2], None, Wanted::Running, Ok("2026-4")),
            (
                &away,
                None,
                Wanted::Running,
                Err("nothing is running here; 2 runs began on other machines: which one?"),
            ),
            (&one, None, Wanted::Any, Ok("2026-2")),
            (&two, None, Wanted::Running, Err("2 runs go on: which one?")),
            (&past, Some("a"), Wanted::Any, Ok("2026-2")),
            (&two, Some("a"), Wanted::Any, Err("2 runs of `a` go on: which one?")),
            (&one, Some("a"), Wanted::Running, Ok("2026-2")),
            (&past, Some("2025"), Wanted::Any, Ok("2025-1")),
            (&past, Some("2026"), Wanted::Any, Err("`2026` begins the names of 2 runs: which one?")),
            (&past, Some("2026-2"), Wanted::Any, Ok("2026-2")),
            (&past, Some("x"), Wanted::Any, Err("no run is named `x`, and no job")),
        ] {
            let found = choose(runs, asked, wanted);
            let found = found.map(|run| run.entry.run.as_str()).map_err(|(why, _)| why);
            assert_eq!(found, want.map_err(str::to_owned), "{asked:?}");
        }
    }
}
