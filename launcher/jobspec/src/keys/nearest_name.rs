//! Finds the known name that is most similar to a misspelled name.

/// Returns the name among `names` that is most similar to the misspelled word `word`. Returns
/// `None` if `word` is not likely to be a misspelling of any of the names.
pub(crate) fn find_nearest_name<'n>(word: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    const MAX_WORD_CHARS: usize = 80;
    if word.len() > MAX_WORD_CHARS {
        return None;
    }
    let word = word.to_lowercase();
    names
        .map(|name| (strsim::damerau_levenshtein(&word, &name.to_lowercase()), name))
        .min()
        .filter(|(distance, name)| *distance <= name.len().max(word.len()) / 3)
        .map(|(_, name)| name)
}
