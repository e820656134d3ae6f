//! The name that was meant.

/// The known name that is closest to what was typed, if any is close.
pub fn nearest<'a>(typed: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let far = typed.chars().count() / 2 + 1;
    known
        .into_iter()
        .map(|name| (distance(typed, name), name))
        .filter(|(d, _)| *d <= far)
        .min()
        .map(|(_, name)| name)
}

/// Edits (insert, remove, replace, swap neighbours) between two words.
fn distance(one: &str, other: &str) -> usize {
    let (one, other): (Vec<char>, Vec<char>) = (one.chars().collect(), other.chars().collect());
    let mut rows = vec![vec![0; other.len() + 1]; one.len() + 1];
    for (i, row) in rows.iter_mut().enumerate() {
        row[0] = i;
    }
    rows[0] = (0..=other.len()).collect();
    for i in 1..=one.len() {
        for j in 1..=other.len() {
            let change = usize::from(one[i - 1] != other[j - 1]);
            let mut best = (rows[i - 1][j] + 1).min(rows[i][j - 1] + 1).min(rows[i - 1][j - 1] + change);
            if i > 1 && j > 1 && one[i - 1] == other[j - 2] && one[i - 2] == other[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            rows[i][j] = best;
        }
    }
    rows[one.len()][other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slip_of_the_finger_is_understood() {
        assert_eq!(nearest("memmory", ["memory", "disk"]), Some("memory"));
        assert_eq!(nearest("dsik", ["memory", "disk"]), Some("disk"));
        assert_eq!(nearest("xyz", ["memory", "disk"]), None);
    }
}
