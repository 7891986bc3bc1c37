//! Assigns optimizer states, which torch stores by the numbers of parameters, to the names of
//! weights.
//!
//! The names follow from the order of the model's parameters, the rule by which programs form
//! parameter groups, and the shapes. The assignment is rejected if these contradict each other, or
//! allow several assignments.
use super::module_order;
use crate::catalog::BorrowedWeightShape;
use crate::error::MatchError;
use std::collections::HashMap;

/// The shape of the optimizer state of each parameter in one parameter group, or `None` for a
/// parameter that has no state.
pub(crate) type StateShapes = Vec<Option<Vec<u64>>>;

/// A rule by which a training program divides weights into two parameter groups: a function that
/// returns true for weights of the first group.
type GroupRule = fn(&BorrowedWeightShape<'_>) -> bool;

/// The rules by which training programs divide weights into parameter groups with and without
/// weight decay. The first group has weight decay.
const GROUP_RULES: [GroupRule; 2] = [is_decayed_by_name, is_matrix];

/// The names of the weights in each of the optimizer's parameter groups.
type GroupNames = Vec<Vec<String>>;

/// A possible division of a model's weights into the parameter groups of the optimizer, as a list
/// of weights per group.
type Grouping<'a> = Vec<Vec<BorrowedWeightShape<'a>>>;

/// Finds the weight to which each optimizer state belongs, and returns the names of the weights of
/// each parameter group. `in_order` states whether `weights` are in the order of the model.
///
/// # Errors
/// Fails if no combination of an order and a rule matches the shapes, or if several combinations
/// give different names.
pub(crate) fn match_states_to_weights(
    groups: &[StateShapes],
    weights: &[BorrowedWeightShape<'_>],
    in_order: bool,
) -> Result<GroupNames, MatchError> {
    let states: usize = groups.iter().map(Vec::len).sum();
    if states != weights.len() {
        return Err(MatchError::Count { states, weights: weights.len() });
    }
    let known: Vec<&str> = weights.iter().map(|(n, _)| *n).collect();
    let orders =
        if in_order { vec![known.clone()] } else { module_order::sort_in_registration_orders(&known) };
    let shapes: HashMap<&str, &[u64]> = weights.iter().copied().collect();
    let is_order_known = !orders.is_empty();
    let mut candidates = Vec::new();
    for order in if is_order_known { orders } else { vec![known] } {
        let weight = |name| (name, shapes.get(name).copied().unwrap_or(&[]));
        candidates.extend(list_groupings(groups.len(), order.into_iter().map(weight).collect())?);
    }
    let mut fitting: Vec<GroupNames> = Vec::new();
    let mut error = MatchError::UnknownOrder;
    for candidate in candidates {
        match match_candidate(groups, &candidate, is_order_known) {
            Ok(names) if !fitting.contains(&names) => fitting.push(names),
            Ok(_) => {}
            Err(e) => error = e,
        }
    }
    match fitting.len() {
        1 => Ok(fitting.swap_remove(0)),
        0 => Err(error),
        _ => Err(MatchError::Ambiguous),
    }
}

/// Lists the ways in which a training program may have divided the weights `sequence` into `groups`
/// parameter groups, one way per known rule. Fails for more than two groups.
fn list_groupings(
    groups: usize,
    sequence: Vec<BorrowedWeightShape<'_>>,
) -> Result<Vec<Grouping<'_>>, MatchError> {
    match groups {
        1 => Ok(vec![vec![sequence]]),
        2 => Ok(GROUP_RULES
            .iter()
            .map(|rule| {
                let (first, second) = sequence.iter().partition(|w| rule(w));
                vec![first, second]
            })
            .collect()),
        groups => Err(MatchError::GroupRule { groups }),
    }
}

/// Assigns the optimizer states in `groups` to weights under the assumption that `candidate` lists
/// the weights of each parameter group. Returns the names of the weights by group. If `in_order` is
/// true, a state belongs to the weight at its position, which must have its shape. Otherwise it
/// belongs to the only weight with its shape. Fails if the shapes do not match.
fn match_candidate(
    groups: &[StateShapes],
    candidate: &[Vec<BorrowedWeightShape<'_>>],
    in_order: bool,
) -> Result<GroupNames, MatchError> {
    let mut names = Vec::new();
    for (g, (states, weights)) in groups.iter().zip(candidate).enumerate() {
        if states.len() != weights.len() {
            return Err(MatchError::GroupSize { group: g, states: states.len(), expected: weights.len() });
        }
        names.push(match in_order {
            true => match_by_position(g, states, weights)?,
            false => match_by_shape(states, weights)?,
        });
    }
    Ok(names)
}

/// Assigns the optimizer state at each position of the list `states` to the weight at this position
/// of the list `weights`, and returns the names of these weights. Fails if a state has a different
/// shape than its weight. `group` is the index of the group, for errors.
fn match_by_position(
    group: usize,
    states: &StateShapes,
    weights: &[BorrowedWeightShape<'_>],
) -> Result<Vec<String>, MatchError> {
    for (index, (state, (name, shape))) in states.iter().zip(weights).enumerate() {
        if let Some(found) = state.as_ref().filter(|s| s != shape) {
            let (found, weight, expected) = (found.clone(), (*name).to_owned(), shape.to_vec());
            return Err(MatchError::StateShape { group, index, found, weight, expected });
        }
    }
    Ok(weights.iter().map(|(name, _)| (*name).to_owned()).collect())
}

/// Assigns each optimizer state to the only weight that has its shape, and returns the names of the
/// weights.
///
/// # Errors
/// Fails if two weights have the same shape, a state has no shape, or no weight has the shape of a
/// state.
fn match_by_shape(
    states: &StateShapes,
    weights: &[BorrowedWeightShape<'_>],
) -> Result<Vec<String>, MatchError> {
    let mut by_shape: HashMap<&[u64], &str> = HashMap::new();
    for (name, shape) in weights {
        if by_shape.insert(shape, name).is_some() {
            return Err(MatchError::UnknownOrder);
        }
    }
    let name = |state: &Option<Vec<u64>>| {
        let shape = state.as_ref().ok_or(MatchError::UnknownOrder)?;
        by_shape
            .remove(shape.as_slice())
            .map(str::to_owned)
            .ok_or_else(|| MatchError::NoWeightOfShape(shape.clone()))
    };
    states.iter().map(name).collect()
}

/// Returns true if HF Trainer applies weight decay to the weight, which depends on its name. HF
/// Trainer excludes biases and norms, by their names.
fn is_decayed_by_name((name, _): &BorrowedWeightShape<'_>) -> bool {
    let lower = name.to_lowercase();
    let norm = |part: &str| {
        part == "norm"
            || part.ends_with("_norm")
            || part.contains("layernorm")
            || part.contains("rmsnorm")
            || part.starts_with("ln_")
    };
    !(lower.contains("bias") || lower.split('.').any(norm))
}

/// Returns true if the weight has at least two dimensions. Many programs apply weight decay only to
/// such weights.
fn is_matrix((_, shape): &BorrowedWeightShape<'_>) -> bool {
    shape.len() >= 2
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The weights of a model for tests, sorted by name as in a file.
    const WEIGHTS: [BorrowedWeightShape<'static>; 4] = [
        ("lm_head.weight", &[8, 2]),
        ("model.embed_tokens.weight", &[8, 2]),
        ("model.layers.0.self_attn.q_proj.weight", &[2, 2]),
        ("model.norm.weight", &[2]),
    ];

    /// Returns the state shapes of a group in which every parameter has a state. `list` are the
    /// shapes.
    fn make_state_shapes(list: &[&[u64]]) -> StateShapes {
        list.iter().map(|s| Some(s.to_vec())).collect()
    }

    #[test]
    fn names_follow_the_order_of_the_model_with_decayed_weights_first() {
        let groups = [make_state_shapes(&[&[8, 2], &[2, 2], &[8, 2]]), make_state_shapes(&[&[2]])];
        let found = match_states_to_weights(&groups, &WEIGHTS, false).expect("fits");
        let decayed =
            ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"];
        assert_eq!(found, [decayed.map(str::to_owned).to_vec(), vec!["model.norm.weight".to_owned()]]);
        let one = [make_state_shapes(&[&[8, 2], &[2, 2], &[2], &[8, 2]])];
        assert_eq!(match_states_to_weights(&one, &WEIGHTS, false).expect("fits")[0][2], "model.norm.weight");
    }

    /// Checks for a model of each family that optimizer states are assigned to the right weights,
    /// with one and with two parameter groups. The weights are sorted by name, and not in the order
    /// of the model.
    #[test]
    fn states_of_every_family_match_their_names() {
        let models: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(include_str!("../../../tests/golden/orders.json")).expect("JSON");
        for (model, weights) in models.iter().filter(|(name, _)| *name != "transformers") {
            let listed: Vec<(String, Vec<u64>)> =
                serde_json::from_value(weights.clone()).expect("names and shapes");
            let ordered: Vec<BorrowedWeightShape<'_>> =
                listed.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
            let (first, second): (Vec<BorrowedWeightShape<'_>>, Vec<_>) =
                ordered.iter().partition(|w| is_decayed_by_name(w));
            let mut sorted = ordered.clone();
            sorted.sort_unstable();
            for groups in [vec![ordered.clone()], vec![first, second]] {
                let shapes: Vec<StateShapes> =
                    groups.iter().map(|g| g.iter().map(|(_, s)| Some(s.to_vec())).collect()).collect();
                let expected: Vec<Vec<&str>> =
                    groups.iter().map(|g| g.iter().map(|(n, _)| *n).collect()).collect();
                assert_eq!(
                    match_states_to_weights(&shapes, &sorted, false).expect(model),
                    expected,
                    "{model}"
                );
            }
        }
    }

    #[test]
    fn mismatches_are_rejected_with_the_reason() {
        let fits: &[&[u64]] = &[&[8, 2], &[2, 2], &[8, 2]];
        for (groups, expected) in [
            (
                vec![make_state_shapes(&[&[8, 2], &[2, 2], &[8, 2]])],
                MatchError::Count { states: 3, weights: 4 },
            ),
            (
                vec![make_state_shapes(&[&[2, 2], &[8, 2], &[8, 2]]), make_state_shapes(&[&[2]])],
                MatchError::StateShape {
                    group: 0,
                    index: 0,
                    found: vec![2, 2],
                    weight: "model.embed_tokens.weight".into(),
                    expected: vec![8, 2],
                },
            ),
            (
                vec![make_state_shapes(&[&[8, 2], &[2, 2]]), make_state_shapes(&[&[2], &[8, 2]])],
                MatchError::GroupSize { group: 0, states: 2, expected: 3 },
            ),
            (
                vec![make_state_shapes(fits), make_state_shapes(&[&[2]]), make_state_shapes(&[])],
                MatchError::GroupRule { groups: 3 },
            ),
        ] {
            assert_eq!(match_states_to_weights(&groups, &WEIGHTS, false), Err(expected));
        }
        let unknown: [BorrowedWeightShape<'_>; 2] = [("a.weight", &[2]), ("b.weight", &[2])];
        let unordered = match_states_to_weights(&[make_state_shapes(&[&[2], &[2]])], &unknown, false);
        assert_eq!(unordered, Err(MatchError::UnknownOrder));
        assert_eq!(
            match_states_to_weights(&[make_state_shapes(&[&[2], &[2]])], &unknown, true).expect("in order")
                [0],
            ["a.weight", "b.weight"]
        );
        let distinct: [BorrowedWeightShape<'_>; 2] = [("a.weight", &[2, 1]), ("b.weight", &[1, 2])];
        assert_eq!(
            match_states_to_weights(&[make_state_shapes(&[&[1, 2], &[2, 1]])], &distinct, false)
                .expect("by shape")[0],
            ["b.weight", "a.weight"]
        );
    }
}
