//! The command line of one worker.
use contract::{ids::Rank, job::RunSpec};

/// The job's command; with `--local_rank=N` after the script's name for programs that want it there.
pub(super) fn of_worker(run: &RunSpec, local_rank: Rank) -> Option<Vec<String>> {
    let mut words = run.command.clone()?;
    if run.local_rank_argument {
        let at = script(&words) + 1;
        words.insert(at.min(words.len()), format!("--local_rank={local_rank}"));
    }
    Some(words)
}

/// Index of the word that names the script: after Python and its options, or the program itself.
fn script(words: &[String]) -> usize {
    let program = words.first().map_or("", |w| w.rsplit('/').next().unwrap_or(w));
    if !program.starts_with("python") && !program.starts_with("pypy") {
        return 0;
    }
    let mut at = 1;
    while let Some(word) = words.get(at) {
        match word.as_str() {
            // The module or the program text follows.
            "-m" | "-c" => return at + 1,
            "-W" | "-X" | "--check-hash-based-pycs" => at += 2,
            option if option.starts_with('-') && option.len() > 1 => at += 1,
            _ => return at,
        }
    }
    words.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_stands_where_older_launchers_put_it() {
        for (command, want) in [
            ("python train.py --lr 1", "python train.py --local_rank=3 --lr 1"),
            (
                "/usr/bin/python3.11 -u -W error train.py",
                "/usr/bin/python3.11 -u -W error train.py --local_rank=3",
            ),
            ("python -m pkg.train x", "python -m pkg.train --local_rank=3 x"),
            ("./train x", "./train --local_rank=3 x"),
            ("python", "python --local_rank=3"),
            ("python -m", "python -m --local_rank=3"),
        ] {
            let mut run = crate::testing::job().run;
            run.command = Some(command.split(' ').map(str::to_owned).collect());
            assert_eq!(of_worker(&run, 3), run.command, "only on request");
            run.local_rank_argument = true;
            assert_eq!(of_worker(&run, 3).expect("words").join(" "), want);
        }
    }
}
