//! An optimizer's states have numbers; the weights that they belong to have names. Which is which is worked out from the
//! order of the model, the rule by which groups are made, and the shapes, and refused unless all of them fit.
use super::order;
use std::collections::HashMap;

/// One group: the shape of each state in it, where it has one.
pub(crate) type Shapes = Vec<Option<Vec<u64>>>;

/// A weight: name and shape.
pub(crate) type Weight<'a> = (&'a str, &'a [u64]);

/// A rule by which weights go into the first of two groups.
type Rule = fn(&Weight<'_>) -> bool;

/// Rules that programs use, weight decay first.
const RULES: [Rule; 2] = [is_decayed_by_name, is_matrix];

/// The names of each group's states. `in_order`: the weights come in the order of the model. `Err` says why it can't be
/// known.
pub(crate) fn names(
    groups: &[Shapes],
    weights: &[Weight<'_>],
    in_order: bool,
) -> Result<Vec<Vec<String>>, String> {
    let states: usize = groups.iter().map(Vec::len).sum();
    if states != weights.len() {
        let count = weights.len();
        return Err(format!("it has states of {states} weights, the model has {count} (some may be frozen)"));
    }
    let known: Vec<&str> = weights.iter().map(|(n, _)| *n).collect();
    let orders = if in_order { vec![known.clone()] } else { order::registered(&known) };
    let shapes: HashMap<&str, &[u64]> = weights.iter().copied().collect();
    let sure = !orders.is_empty();
    let mut candidates = Vec::new();
    for order in if sure { orders } else { vec![known] } {
        let weight = |name| (name, shapes.get(name).copied().unwrap_or(&[]));
        candidates.extend(grouped(groups.len(), order.into_iter().map(weight).collect())?);
    }
    let mut fitting: Vec<Vec<Vec<String>>> = Vec::new();
    let mut why = String::new();
    for candidate in candidates {
        match fit(groups, &candidate, sure) {
            Ok(names) if !fitting.contains(&names) => fitting.push(names),
            Ok(_) => {}
            Err(e) => why = e,
        }
    }
    match fitting.len() {
        1 => Ok(fitting.swap_remove(0)),
        0 => Err(why),
        _ => Err("its groups fit the weights in more than one way".into()),
    }
}

/// The ways in which programs put weights into so many groups.
fn grouped(groups: usize, sequence: Vec<Weight<'_>>) -> Result<Vec<Vec<Vec<Weight<'_>>>>, String> {
    match groups {
        1 => Ok(vec![vec![sequence]]),
        2 => Ok(RULES
            .iter()
            .map(|rule| {
                let (first, second) = sequence.iter().partition(|w| rule(w));
                vec![first, second]
            })
            .collect()),
        more => Err(format!("it has {more} groups, and how weights went into them isn't known")),
    }
}

/// The names in the groups' order when the shapes fit. Without the model's order, shapes alone decide.
fn fit(groups: &[Shapes], candidate: &[Vec<Weight<'_>>], in_order: bool) -> Result<Vec<Vec<String>>, String> {
    let mut all = Vec::new();
    for (g, (states, weights)) in groups.iter().zip(candidate).enumerate() {
        if states.len() != weights.len() {
            return Err(format!(
                "its group {g} has states of {} weights, by the usual rule there would be {}",
                states.len(),
                weights.len()
            ));
        }
        all.push(match in_order {
            true => in_turn(g, states, weights)?,
            false => by_shape(states, weights)?,
        });
    }
    Ok(all)
}

fn in_turn(g: usize, states: &Shapes, weights: &[Weight<'_>]) -> Result<Vec<String>, String> {
    for (i, (state, (name, shape))) in states.iter().zip(weights).enumerate() {
        if state.as_ref().is_some_and(|s| s != shape) {
            return Err(format!("its state {i} of group {g} has the shape {state:?}, {name} has {shape:?}"));
        }
    }
    Ok(weights.iter().map(|(name, _)| (*name).to_owned()).collect())
}

fn by_shape(states: &Shapes, weights: &[Weight<'_>]) -> Result<Vec<String>, String> {
    let unknown =
        || "the order of the model's weights isn't known, and shapes alone don't tell them apart".to_owned();
    let mut by_shape: HashMap<&[u64], &str> = HashMap::new();
    for (name, shape) in weights {
        if by_shape.insert(shape, name).is_some() {
            return Err(unknown());
        }
    }
    let name = |state: &Option<Vec<u64>>| {
        let shape = state.as_ref().ok_or_else(unknown)?;
        by_shape
            .remove(shape.as_slice())
            .map(str::to_owned)
            .ok_or_else(|| format!("no weight has the shape {shape:?}"))
    };
    states.iter().map(name).collect()
}

/// As HF Trainer decides: no decay for biases and norms.
fn is_decayed_by_name((name, _): &Weight<'_>) -> bool {
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

/// As many programs decide: decay for matrices alone.
fn is_matrix((_, shape): &Weight<'_>) -> bool {
    shape.len() >= 2
}

#[cfg(test)]
mod tests {
    use super::*;

    const WEIGHTS: [Weight<'static>; 4] = [
        ("lm_head.weight", &[8, 2]),
        ("model.embed_tokens.weight", &[8, 2]),
        ("model.layers.0.self_attn.q_proj.weight", &[2, 2]),
        ("model.norm.weight", &[2]),
    ];

    fn shapes(list: &[&[u64]]) -> Shapes {
        list.iter().map(|s| Some(s.to_vec())).collect()
    }

    #[test]
    fn names_come_in_the_model_s_order_with_decay_first() {
        let groups = [shapes(&[&[8, 2], &[2, 2], &[8, 2]]), shapes(&[&[2]])];
        let found = names(&groups, &WEIGHTS, false).expect("fits");
        let decayed =
            ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"];
        assert_eq!(found, [decayed.map(str::to_owned).to_vec(), vec!["model.norm.weight".to_owned()]]);
        let one = [shapes(&[&[8, 2], &[2, 2], &[2], &[8, 2]])];
        assert_eq!(names(&one, &WEIGHTS, false).expect("fits")[0][2], "model.norm.weight");
    }

    /// Each family of transformers with one group and with two: states in its order find their names, whatever order the
    /// names come in.
    #[test]
    fn states_of_every_family_find_their_names() {
        let all: serde_json::Map<String, serde_json::Value> =
            serde_json::from_str(include_str!("../../tests/golden/orders.json")).expect("JSON");
        for (model, weights) in all.iter().filter(|(name, _)| *name != "transformers") {
            let own: Vec<(String, Vec<u64>)> =
                serde_json::from_value(weights.clone()).expect("names and shapes");
            let own: Vec<Weight<'_>> = own.iter().map(|(n, s)| (n.as_str(), s.as_slice())).collect();
            let (first, second): (Vec<Weight<'_>>, Vec<_>) = own.iter().partition(|w| is_decayed_by_name(w));
            let mut sorted = own.clone();
            sorted.sort_unstable();
            for groups in [vec![own.clone()], vec![first, second]] {
                let shapes: Vec<Shapes> =
                    groups.iter().map(|g| g.iter().map(|(_, s)| Some(s.to_vec())).collect()).collect();
                let expected: Vec<Vec<&str>> =
                    groups.iter().map(|g| g.iter().map(|(n, _)| *n).collect()).collect();
                assert_eq!(names(&shapes, &sorted, false).expect(model), expected, "{model}");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_reason() {
        let fits: &[&[u64]] = &[&[8, 2], &[2, 2], &[8, 2]];
        for (groups, reason) in [
            (vec![shapes(&[&[8, 2], &[2, 2], &[8, 2]])], "states of 3 weights, the model has 4"),
            (vec![shapes(&[&[2, 2], &[8, 2], &[8, 2]]), shapes(&[&[2]])], "has the shape Some([2, 2])"),
            (
                vec![shapes(&[&[8, 2], &[2, 2]]), shapes(&[&[2], &[8, 2]])],
                "by the usual rule there would be 3",
            ),
            (vec![shapes(fits), shapes(&[&[2]]), shapes(&[])], "3 groups"),
        ] {
            let why = names(&groups, &WEIGHTS, false).expect_err(reason);
            assert!(why.contains(reason), "{why} lacks {reason}");
        }
        let mine: [Weight<'_>; 2] = [("a.weight", &[2]), ("b.weight", &[2])];
        let why = names(&[shapes(&[&[2], &[2]])], &mine, false).expect_err("ambiguous");
        assert!(why.contains("shapes alone"), "{why}");
        assert_eq!(
            names(&[shapes(&[&[2], &[2]])], &mine, true).expect("in order")[0],
            ["a.weight", "b.weight"]
        );
        let told: [Weight<'_>; 2] = [("a.weight", &[2, 1]), ("b.weight", &[1, 2])];
        assert_eq!(
            names(&[shapes(&[&[1, 2], &[2, 1]])], &told, false).expect("by shape")[0],
            ["b.weight", "a.weight"]
        );
    }
}
