//! `run.wrap`: programs that start the workers of some ranks, such as profilers and debuggers.
use super::run_values::command_type;
use crate::{
    ids::Rank,
    keys::{
        key::Key,
        section::section,
        value_type::{ReadResult, ValueType, wrong_format_error, wrong_type_error},
    },
    yaml::{
        format::quote_yaml,
        tree::{YamlNode, YamlValue},
    },
};
use serde::{Deserialize, Serialize};
use serde_json::json;

section! {
    /// An item of `run.wrap`: the ranks, and the words that precede their command.
    #[derive(Default)]
    pub struct WrapSpec at "";
    /// The ranks.
    pub ranks: RankSelection = Key::required(rank_selection_type());
    /// The words that precede the command of these ranks.
    ///
    /// `{rank}`, `{local_rank}`, `{host}`, `{run}` and `{attempt}` are replaced.
    pub command: Vec<String> = Key::required(command_type());
}

impl WrapSpec {
    /// Returns the wrapper program and its arguments for one worker, with placeholders such as
    /// `{rank}` replaced by their values in `values`. Other text in braces is unchanged, because
    /// profilers have placeholders, too.
    pub fn expand_words(&self, values: &[(&str, String)]) -> Vec<String> {
        self.command.iter().map(|word| expand_placeholders(word, values)).collect()
    }
}

/// Replaces each placeholder, such as `{rank}`, in `word` by its value. Values are not searched for
/// placeholders.
fn expand_placeholders(word: &str, values: &[(&str, String)]) -> String {
    let (mut text, mut rest) = (String::new(), word);
    while let Some(open) = rest.find('{') {
        let (before, from_open) = rest.split_at(open);
        text.push_str(before);
        let placeholder = values.iter().find_map(|(name, value)| {
            let after = from_open.strip_prefix('{')?.strip_prefix(name)?.strip_prefix('}')?;
            Some((value, after))
        });
        rest = match placeholder {
            Some((value, after)) => {
                text.push_str(value);
                after
            }
            None => {
                text.push('{');
                &from_open[1..]
            }
        };
    }
    text + rest
}

/// The largest number of ranges of ranks in a selection such as `0,3-5`.
const MAX_RANK_RANGES: usize = 1024;

/// A selection of ranks, such as `all` or `0,3-5`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum RankSelection {
    /// All ranks of the job.
    #[default]
    All,
    /// Ranges of ranks: the first and the last rank of each.
    Ranges(Vec<(Rank, Rank)>),
}

impl RankSelection {
    /// Returns whether the selection contains the rank `rank`.
    pub fn contains(&self, rank: Rank) -> bool {
        match self {
            RankSelection::All => true,
            RankSelection::Ranges(ranges) => {
                ranges.iter().any(|(first, last)| (*first..=*last).contains(&rank))
            }
        }
    }

    /// Returns the largest rank that the selection names; `None` if it contains all ranks.
    pub fn largest_rank(&self) -> Option<Rank> {
        match self {
            RankSelection::All => None,
            RankSelection::Ranges(ranges) => ranges.iter().map(|(_, last)| *last).max(),
        }
    }

    /// Formats the selection of ranks as in a job file, such as `0,3-5`.
    pub fn format(&self) -> String {
        let RankSelection::Ranges(ranges) = self else { return "all".to_owned() };
        let range = |(first, last): &(Rank, Rank)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        };
        ranges.iter().map(range).collect::<Vec<_>>().join(",")
    }

    /// Parses ranges of ranks such as `0,3-5`. Returns `None` for another text.
    fn parse_ranges(text: &str) -> Option<RankSelection> {
        let parse = |text: &str| text.trim().parse::<Rank>().ok().filter(|rank| *rank < Rank::MAX);
        let range = |part: &str| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last) = (parse(first)?, parse(last)?);
            (first <= last).then_some((first, last))
        };
        let ranges: Vec<_> = text.split(',').map(range).collect::<Option<_>>()?;
        (ranges.len() <= MAX_RANK_RANGES).then_some(RankSelection::Ranges(ranges))
    }
}

/// Returns the parser and printer ([`ValueType`]) for a selection of ranks: `all`, a rank, or
/// ranges of ranks.
fn rank_selection_type() -> ValueType<RankSelection> {
    let schema = json!({"anyOf": [
        {"enum": ["all"]}, {"type": "integer", "minimum": 0},
        {"type": "string", "pattern": "^ *[0-9]+ *(- *[0-9]+ *)?(, *[0-9]+ *(- *[0-9]+ *)?)*$"},
    ]});
    ValueType::new_single_line("`all` or ranks such as `0,3-5`", schema, read_rank_selection, |ranks| {
        match ranks {
            RankSelection::All => ranks.format(),
            RankSelection::Ranges(_) => quote_yaml(&ranks.format()),
        }
    })
    .with_expected_phrase(EXPECTED_RANKS)
}

/// The phrase by which messages describe a selection of ranks.
const EXPECTED_RANKS: &str = "`all`, or ranks such as \"0,3-5\"";

/// Reads a selection of ranks, such as `all` or `0,3-5`, from YAML.
fn read_rank_selection(node: &YamlNode) -> ReadResult<RankSelection> {
    match node.value {
        YamlValue::Text if node.raw == "all" => Ok(RankSelection::All),
        YamlValue::Text | YamlValue::Int(_) => {
            RankSelection::parse_ranges(&node.raw).ok_or_else(|| wrong_format_error(EXPECTED_RANKS, node))
        }
        _ => Err(wrong_type_error(EXPECTED_RANKS, node)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{JobSource, load_job};

    #[test]
    fn selections_contain_their_ranks() {
        let selection = RankSelection::parse_ranges("0, 3-5").expect("ranges");
        let ranks: Vec<Rank> = (0..8).filter(|rank| selection.contains(*rank)).collect();
        assert_eq!((ranks, selection.format()), (vec![0, 3, 4, 5], "0,3-5".to_owned()));
        assert_eq!((selection.largest_rank(), RankSelection::All.largest_rank()), (Some(5), None));
        assert!(RankSelection::All.contains(7));
        for wrong in ["", "5-3", "-1", "1,", "a", "1-2-3", "4294967295"] {
            assert_eq!(RankSelection::parse_ranges(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn only_known_placeholders_are_replaced() {
        let values = [("rank", "3".to_owned()), ("host", "{rank}".to_owned())];
        for (word, expanded) in
            [("out-{rank}.{host}", "out-3.{rank}"), ("%q{RANK}{", "%q{RANK}{"), ("{{rank}}", "{3}"), ("", "")]
        {
            assert_eq!(expand_placeholders(word, &values), expanded);
        }
    }

    #[test]
    fn items_are_read_and_printed() {
        let load = |wrap: &str| {
            let text = format!("run: {{command: [a], wrap: {wrap}}}");
            load_job(JobSource::Text { name: "a.yaml".to_owned(), text }, &[])
        };
        let text =
            "[{ranks: \"0,3-5\", command: [nsys, profile, -o, \"r-{rank}\"]}, {ranks: all, command: [nice]}]";
        let job = load(text).expect("a job").0;
        let printed = crate::list_key_values(&job)["run.wrap"].clone();
        assert_eq!(load(&printed).expect("a job").0.run.wrap, job.run.wrap, "{printed}");
        assert_eq!(job.run.wrap.len(), 2);
        assert_eq!(
            load("[{ranks: 1, command: [nice]}]").expect("a job").0.run.wrap[0].ranks.largest_rank(),
            Some(1)
        );
        for wrong in ["[{ranks: all}]", "[{command: [nice]}]", "[{ranks: none, command: [nice]}]", "[nice]"] {
            load(wrong).expect_err(wrong);
        }
    }
}
